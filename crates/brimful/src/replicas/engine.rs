//! Implements the step engine for replicas. An attempt ends on the caller's thread, in the first replica's
//! memory.

use tch::{Device, Tensor};

use super::Replicas;
use crate::auto::Kind;
use crate::batch::Samples;
use crate::memory::Memory;
use crate::step::{
    Engine, Hints, Parts, PartsEngine, Seeding, StepState, Team, Trained, gradient_bytes, names,
};
use crate::workers::DeviceSpec;
use crate::{Result, device};

impl<M: 'static> Engine for Replicas<M> {
    type Attempt = Parts;

    fn state(&mut self) -> &mut StepState<Parts> {
        &mut self.state
    }

    fn seeding(&self, _team: &Team) -> Seeding {
        Seeding::Step(self.devices.iter().map(|device| device.device).collect())
    }

    fn begin(&mut self, devices: &[Device]) -> Result<bool> {
        // The caller may have computed the batch on its own stream, which the threads' work must follow.
        self.workers.involve(devices.iter().copied());
        self.apply_settings()?;
        Ok(false)
    }

    fn trained(&mut self) -> Result<Option<Trained>> {
        // Ranks send gradients only after all have reported which parameters they train.
        Ok(None)
    }

    fn largest_part(&self, samples: &Samples) -> Result<Samples> {
        let parts = self.speeds.shares(samples).into_iter().map(|share| samples.part(&share));
        Ok(parts.max_by_key(Samples::units).unwrap_or_default())
    }

    fn memories(&mut self) -> Vec<Option<Memory>> {
        self.devices.iter().map(DeviceSpec::memory).collect()
    }

    fn floors(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        let training = kind.is_training();
        // Every replica has its own gradients during a step, though only the first keeps them.
        let floor = if training { gradient_bytes(&self.store.variables_) } else { 0 };
        Ok(vec![floor; self.devices.len()])
    }

    fn named(&mut self) -> Result<Vec<(String, Tensor)>> {
        Ok(names(&self.store.variables_).into_list())
    }

    fn place(&self) -> String {
        device::names(self.devices.iter().map(|device| device.device))
    }

    fn kept_for_captures(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        if !self.cuda_graphs {
            return Ok(Vec::new());
        }
        let kind = kind.clone();
        let size = self.state.size;
        self.workers.all(move |replica| Ok(replica.micro.captures_keep(&kind, size)?.0))
    }

    fn hints(&mut self) -> Hints {
        Hints { hold: false, even: self.cuda_graphs }
    }

    fn drop_captures(&mut self) -> Result<()> {
        if !self.cuda_graphs {
            return Ok(());
        }
        self.workers.all(|replica| replica.micro.drop_captures()).map(drop)
    }
}

impl<M: 'static> PartsEngine for Replicas<M> {
    fn main_memory(&self) -> Option<Memory> {
        self.devices[0].memory()
    }
}
