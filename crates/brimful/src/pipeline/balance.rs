//! How the layers are cut into stages: given, evenly, or by measuring them.

use brimful_torch::threads::limit_threads;
use tch::Tensor;

use crate::balance::{self, Layer, Load, Profile, Slot};
use crate::batch::{self, Batch};
use crate::crew::StageDevice;
use crate::memory::Memory;
use crate::plan::{self, Request};
use crate::schedule::{DeviceId, Recompute, Schedule, StageId};
use crate::{Layers, Result};

/// How the layers are cut into stages: given, or found by measuring them.
///
/// `[3, 4]` is a balance, as is a `Vec` and a [`balance::Balance`].
#[derive(Debug)]
pub struct Balance(Choice);

#[derive(Debug)]
enum Choice {
    Even,
    Given(Vec<usize>),
    ByTime(Vec<Tensor>),
    ByBytes(Vec<Tensor>),
}

impl Balance {
    /// The slowest stage as fast as can be, within the devices' limits. The layers are measured on
    /// the first device with these samples, which are a micro-batch or like one.
    pub fn by_time(sample: &impl Batch) -> Self {
        Self(Choice::ByTime(leaves(sample)))
    }

    /// The fullest stage as empty as can be: parameters, their gradients, and the activations that
    /// the schedule holds. Measured as by [`Balance::by_time`].
    pub fn by_bytes(sample: &impl Batch) -> Self {
        Self(Choice::ByBytes(leaves(sample)))
    }
}

impl<const N: usize> From<[usize; N]> for Balance {
    fn from(sizes: [usize; N]) -> Self {
        Self(Choice::Given(sizes.into()))
    }
}

impl From<Vec<usize>> for Balance {
    fn from(sizes: Vec<usize>) -> Self {
        Self(Choice::Given(sizes))
    }
}

impl From<&balance::Balance> for Balance {
    fn from(balance: &balance::Balance) -> Self {
        Self(Choice::Given(balance.sizes().to_vec()))
    }
}

impl From<balance::Balance> for Balance {
    fn from(balance: balance::Balance) -> Self {
        (&balance).into()
    }
}

impl Default for Balance {
    fn default() -> Self {
        Self(Choice::Even)
    }
}

/// What a balance is for.
pub(super) struct Question<'a> {
    pub(super) layers: &'a Layers,
    /// The device that layers are measured on.
    pub(super) first: &'a StageDevice,
    /// Where each device's memory ends, if that is known.
    pub(super) limits: &'a [Option<u64>],
    pub(super) schedule: Schedule,
    pub(super) recompute: Recompute,
    pub(super) micro_batches: usize,
}

impl Question<'_> {
    /// The balance in numbers.
    pub(super) fn settle(&self, balance: &Balance) -> Result<balance::Balance> {
        match &balance.0 {
            Choice::Given(sizes) => Ok(balance::Balance::new(sizes.clone(), self.layers.len())?),
            Choice::Even => self.evenly(),
            Choice::ByTime(sample) => self.by_time(sample),
            Choice::ByBytes(sample) => self.by_bytes(sample),
        }
    }

    fn evenly(&self) -> Result<balance::Balance> {
        let load = Load { time: 1.0, ..Load::default() };
        let stages = self.limits.len() * self.schedule.stages_per_device();
        Ok(balance::by_time(&vec![load; self.layers.len()], &vec![Slot::default(); stages])?)
    }

    /// The planner's balance for this schedule, with the sample as a micro-batch.
    fn by_time(&self, sample: &Vec<Tensor>) -> Result<balance::Balance> {
        let profile = self.profile(sample)?;
        let samples = batch::len(sample)? * self.micro_batches;
        let device = |memory: &Option<u64>| plan::Device { memory: *memory, speed: 1.0 };
        let devices = self.limits.iter().map(device).collect();
        let mut request = Request::new(&profile, devices, samples);
        request.schedules = vec![self.schedule];
        request.micro_batches = vec![self.micro_batches];
        request.recompute = vec![self.recompute];
        let mut plan = plan::plan(&request)?;
        Ok(plan.rows.swap_remove(0).balance)
    }

    fn by_bytes(&self, sample: &Vec<Tensor>) -> Result<balance::Balance> {
        let profile = self.profile(sample)?;
        let samples = batch::len(sample)? as u64;
        let load = |layer: &Layer| Load {
            time: 0.0,
            bytes: layer.parameter_bytes * 2,
            activation_bytes: layer.activation_bytes * samples,
            output_bytes: layer.output_bytes * samples,
        };
        let (devices, m) = (self.limits.len(), self.micro_batches);
        let actions = self.schedule.actions(devices, m, self.recompute)?;
        let slot = |(j, device): (usize, &DeviceId)| Slot {
            speed: 1.0,
            memory: self.limits[device.index()],
            held: actions.held(StageId::at(j)) as u64,
        };
        let loads: Vec<_> = profile.layers.iter().map(load).collect();
        let slots: Vec<_> = actions.placement().iter().enumerate().map(slot).collect();
        Ok(balance::by_bytes(&loads, &slots)?)
    }

    /// What the layers cost on the first device.
    fn profile(&self, sample: &Vec<Tensor>) -> Result<Profile> {
        let _threads = self.first.threads.map(limit_threads);
        Profile::measure(self.layers, self.first.device, sample)
    }
}

fn leaves(sample: &impl Batch) -> Vec<Tensor> {
    let mut leaves = Vec::new();
    sample.visit(&mut |leaf| leaves.push(leaf.tensor().shallow_clone()));
    leaves
}

/// Where the device's memory ends, if that is known.
pub(super) fn limit(device: &StageDevice) -> Option<u64> {
    match device.memory()? {
        Memory::Arena(arena) => arena.limit(),
        accelerator => accelerator.usage().ok()?.available.map(|bytes| bytes.0),
    }
}
