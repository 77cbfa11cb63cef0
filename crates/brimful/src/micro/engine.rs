//! One device as a kind of step engine: its memory and its attempts.

use tch::Tensor;

use super::MicroBatcher;
use crate::auto::{Kind, Use};
use crate::memory::{Arena, Memory};
use crate::step::{
    Engine, Hints, MicroBatches, Parts, PartsEngine, Seeding, StepState, Team, Trained,
    gradient_bytes, names, parameters,
};
use crate::{Result, device};
use brimful_plan::bytes::Bytes;

impl Engine for MicroBatcher {
    type Attempt = Parts;

    fn state(&mut self) -> &mut StepState<Parts> {
        &mut self.state
    }

    fn seeding(&self, team: &Team) -> Seeding {
        match team.is_alone() {
            // Draws as a plain loop does, so that a model trained without this library gives the same numbers.
            true => Seeding::Plain,
            false => Seeding::Step(vec![self.device]),
        }
    }

    fn trained(&mut self) -> Result<Option<Trained>> {
        Ok(Some(Trained::of(&parameters(&self.variables), &names(&self.variables))))
    }

    fn runs_in_pieces(&self, kind: &Kind) -> bool {
        // A loss on all outputs cuts the whole mini-batch before the need of any piece is known.
        kind.used != Use::TrainWhole
    }

    fn memories(&mut self) -> Vec<Option<Memory>> {
        // A size cannot be learnt from memory that is not counted.
        let memory = self.memory.get_or_insert_with(|| Memory::Arena(Arena::new("cpu")));
        vec![Some(memory.clone())]
    }

    fn floors(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        Ok(vec![if kind.is_training() { gradient_bytes(&self.variables) } else { 0 }])
    }

    fn named(&mut self) -> Result<Vec<(String, Tensor)>> {
        Ok(names(&self.variables).into_list())
    }

    fn place(&self) -> String {
        device::name(self.device)
    }

    fn kept_for_captures(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        Ok(vec![self.captures_keep(kind, self.state.size)?.0])
    }

    fn hints(&mut self) -> Hints {
        Hints { hold: self.format_choice.is_measuring(), even: self.graphs.wanted }
    }

    fn drop_captures(&mut self) -> Result<()> {
        self.graphs.clear()
    }
}

impl PartsEngine for MicroBatcher {
    fn main_memory(&self) -> Option<Memory> {
        self.memory.clone()
    }
}

impl MicroBatcher {
    /// Returns the bytes that a step must leave to CUDA graphs. Evaluations leave what graphs keep. Training leaves
    /// room for captures at the fastest size; at other sizes it leaves nothing, and graphs are dropped if need be.
    pub(crate) fn captures_keep(&self, kind: &Kind, size: MicroBatches) -> Result<Bytes> {
        let Some(memory) = &self.memory else { return Ok(Bytes(0)) };
        Ok(match (kind.is_training(), memory.usage()?.available) {
            (false, _) => self.graphs.kept(),
            // The largest size is an end in itself and leaves no memory to graphs; the fastest size is fast
            // because of them.
            (true, Some(available)) if size == MicroBatches::Auto => self.graphs.spare(available),
            (true, _) => Bytes(0),
        })
    }
}
