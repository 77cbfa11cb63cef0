//! Replicas as a kind of step engine: which memories they use, and what becomes of what they have
//! tried. It is settled on the caller's thread, in the first replica's memory.

use std::sync::Arc;

use tch::{Device, Tensor};

use super::Replicas;
use crate::auto::{Identity, Kind};
use crate::memory::{self, Memory};
use crate::step::{
    Engine, Exchange, Figures, Hints, Lesson, PartReport, Parts, Seeding, StepState, Team, Trained,
    Whole, gradient_bytes, names, parameters,
};
use crate::workers::StageDevice;
use crate::{Bytes, Result, device};

impl<M: 'static> Engine for Replicas<M> {
    type Tried = Parts;

    fn state(&mut self) -> &mut StepState<Parts> {
        &mut self.state
    }

    fn seeding(&self, _team: &Team, _training: bool) -> Seeding {
        Seeding::Step(self.devices.iter().map(|device| device.device).collect())
    }

    fn begin(&mut self, devices: &[Device]) -> Result<bool> {
        // The caller may have computed the batch on a stream of its own, which the threads come after.
        self.workers.involve(devices.iter().copied());
        self.apply_settings()?;
        Ok(false)
    }

    fn trained(&mut self) -> Result<Option<Trained>> {
        // Gradients set out after all ranks have told what they train.
        Ok(None)
    }

    fn longest_part(&self, samples: usize) -> usize {
        self.speeds.shares(samples).iter().map(ExactSizeIterator::len).max().unwrap_or_default()
    }

    fn memories(&mut self) -> Vec<Option<Memory>> {
        self.devices.iter().map(StageDevice::memory).collect()
    }

    fn floors(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        let training = kind.is_training();
        // Every replica has gradients of its own while it runs, though only the first keeps them.
        let floor = if training { gradient_bytes(&self.store.variables_) } else { 0 };
        Ok(vec![floor; self.devices.len()])
    }

    fn identity(&mut self) -> Result<Identity> {
        let names_: Vec<String> = self.devices.iter().map(|d| device::name(d.device)).collect();
        let ends = self.devices.iter().map(|device| memory::end_of(device.memory().as_ref()));
        let total = ends.collect::<Result<Vec<Bytes>>>()?.into_iter().map(|end| end.0).sum();
        let dtype = parameters(&self.store.variables_).first().map(Tensor::kind);
        let named = names(&self.store.variables_).into_list();
        // Of all devices together: with one more of them, or one less, parts are of other lengths.
        let goal = format!("{:?}", self.state.size);
        Ok(Identity::new(&named, dtype, names_.join("+"), total, goal))
    }

    fn kept_for_captures(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        if !self.replays {
            return Ok(Vec::new());
        }
        let kind = kind.clone();
        let size = self.state.size;
        self.workers.all(move |replica| Ok(replica.captures_keep(&kind, size)?.0))
    }

    fn hints(&mut self) -> Hints {
        Hints { hold: false, even: self.replays }
    }

    fn drop_captures(&mut self) -> Result<()> {
        if !self.replays {
            return Ok(());
        }
        self.workers.all(|replica| replica.drop_captures()).map(drop)
    }

    fn tell(&mut self, parts: &mut Parts, exchange: &Exchange) -> Result<Vec<PartReport>> {
        // This is the caller's thread, whose memory account is no replica's: what is computed here from
        // the sums belongs to the first one.
        let first = self.devices[0].memory();
        let _inside = first.as_ref().and_then(Memory::enter);
        self.state.tell(parts, exchange)
    }

    fn prepare(
        &mut self,
        parts: &mut Parts,
        whole: &Arc<Whole>,
        exchange: &Exchange,
    ) -> Result<()> {
        let first = self.devices[0].memory();
        let _inside = first.as_ref().and_then(Memory::enter);
        parts.prepare(whole, exchange)
    }

    fn commit(&mut self, parts: &mut Parts) -> Result<()> {
        parts.tried.commit()
    }

    fn undo(&mut self, parts: Parts) -> Result<()> {
        parts.tried.undo.run()
    }

    fn make_lasting(&mut self, window: Option<&Parts>, parts: &mut Parts) -> Result<()> {
        let first = self.devices[0].memory();
        let _inside = first.as_ref().and_then(Memory::enter);
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
        parts.report(self.devices[0].memory().as_ref())
    }
}
