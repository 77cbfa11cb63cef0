//! One device as a kind of step engine: which memory it uses, and what becomes of what it has tried.

use std::sync::Arc;

use tch::Tensor;

use super::MicroBatcher;
use crate::auto::{Identity, Kind, Use};
use crate::bytes::Bytes;
use crate::memory::{self, Arena, Memory};
use crate::step::{
    Engine, Exchange, Figures, Hints, Lesson, PartReport, Parts, Seeding, Size, StepState, Team,
    Trained, Whole, gradient_bytes, names, parameters,
};
use crate::{Result, device};

impl Engine for MicroBatcher {
    type Tried = Parts;

    fn state(&mut self) -> &mut StepState<Parts> {
        &mut self.state
    }

    fn seeding(&self, team: &Team, _training: bool) -> Seeding {
        match team.is_alone() {
            // As a plain loop draws, so that a model trained without this library gives the same numbers.
            true => Seeding::Plain,
            false => Seeding::Step(vec![self.device]),
        }
    }

    fn trained(&mut self) -> Result<Option<Trained>> {
        Ok(Some(Trained::of(&parameters(&self.variables), &names(&self.variables))))
    }

    fn runs_in_pieces(&self, kind: &Kind) -> bool {
        // A loss on all outputs needs them all cut before it is known what a part of them needs.
        kind.used != Use::TrainWhole
    }

    fn memories(&mut self) -> Vec<Option<Memory>> {
        // A size cannot be learnt from what is not counted.
        let memory = self.memory.get_or_insert_with(|| Memory::Arena(Arena::new("cpu")));
        vec![Some(memory.clone())]
    }

    fn floors(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        Ok(vec![if kind.is_training() { gradient_bytes(&self.variables) } else { 0 }])
    }

    fn identity(&mut self) -> Result<Identity> {
        let memory = memory::end_of(self.memory.as_ref())?;
        let dtype = parameters(&self.variables).first().map(Tensor::kind);
        let named = names(&self.variables).into_list();
        let device = device::name(self.device);
        Ok(Identity::new(&named, dtype, device, memory.0, format!("{:?}", self.state.size)))
    }

    fn kept_for_captures(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        Ok(vec![self.captures_keep(kind, self.state.size)?.0])
    }

    fn hints(&mut self) -> Hints {
        Hints { hold: self.arrangement.is_measuring(), even: self.replay.is_wanted() }
    }

    fn drop_captures(&mut self) -> Result<()> {
        self.replay.clear()
    }

    fn tell(&mut self, parts: &mut Parts, exchange: &Exchange) -> Result<Vec<PartReport>> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        self.state.tell(parts, exchange)
    }

    fn prepare(
        &mut self,
        parts: &mut Parts,
        whole: &Arc<Whole>,
        exchange: &Exchange,
    ) -> Result<()> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        parts.prepare(whole, exchange)
    }

    fn commit(&mut self, parts: &mut Parts) -> Result<()> {
        parts.tried.commit()
    }

    fn undo(&mut self, parts: Parts) -> Result<()> {
        parts.tried.undo.run()
    }

    fn make_lasting(&mut self, window: Option<&Parts>, parts: &mut Parts) -> Result<()> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        parts.tried.make_lasting(window.map(|window| &window.tried))
    }

    fn extend(&mut self, window: Option<Parts>, later: Parts) -> Result<Parts> {
        later.after(window)
    }

    fn check_trained(&mut self, window: &Parts) -> Result<()> {
        window.tried.check_trained()
    }

    fn lesson(parts: &Parts) -> Lesson {
        parts.lesson()
    }

    fn figures(&mut self, parts: &Parts, _whole: &Whole) -> Result<Figures> {
        parts.report(self.memory.as_ref())
    }
}

impl MicroBatcher {
    /// Bytes that a step is not to plan with. Captured work gives way to training, but not to anything
    /// else.
    pub(crate) fn captures_keep(&self, kind: &Kind, size: Size) -> Result<Bytes> {
        let Some(memory) = &self.memory else { return Ok(Bytes(0)) };
        Ok(match (kind.is_training(), memory.usage()?.available) {
            (false, _) => self.replay.kept(),
            // The largest size is wanted for itself, and leaves nothing; the fastest is fast by replays.
            (true, Some(available)) if size == Size::Auto => self.replay.spare(available),
            (true, _) => Bytes(0),
        })
    }
}
