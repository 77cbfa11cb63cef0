//! What the planner is asked: a model, devices, and what it may choose from.

use crate::balance::Profile;
use crate::schedule::{BusCost, Costs, Home, LinkCost, Recompute, Schedule, StageHome, is_time};

use super::{PlanChoice, PlanError};

/// A device as the planner sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanDevice {
    /// How fast it is; the profile's times are divided by it.
    pub speed: f64,
    /// How many bytes it has for us; `None` is no limit.
    pub memory: Option<u64>,
}

impl Default for PlanDevice {
    /// As fast as the one that was profiled, without a limit.
    fn default() -> Self {
        Self { speed: 1.0, memory: None }
    }
}

/// An optimizer at home that computes updates ahead, beside its state, while the backward goes on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LookAhead {
    /// Bytes that it computes them in, for each byte of parameters but the first stage's.
    pub bytes: f64,
    /// Bytes of the host's memory that it leaves alone: without room beside all else it does not look ahead.
    pub spared: u64,
}

/// A question to the planner.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// The model.
    pub profile: &'a Profile,
    /// The devices, in the order of the pipeline.
    pub devices: Vec<PlanDevice>,
    /// Samples in the mini-batch.
    pub samples: usize,
    /// The way between two devices.
    pub link: LinkCost,
    /// The way between a device and host memory.
    pub bus: BusCost,
    /// Bytes of gradients, as they are summed, for each byte of parameters: 1, or 2 where the sums of
    /// half-precision ones are in f32.
    pub gradient_bytes: f64,
    /// Whether a micro-batch's gradients are added to the sums when a stage's backward is over, as on an
    /// accelerator and in half precision; else those of each layer are at once. Where stages live on the host it is
    /// so whatever is said here.
    pub sums_apart: bool,
    /// Bytes of optimizer state for each byte of parameters: 0 for plain SGD, 1 with momentum, 2
    /// for Adam.
    pub optimizer_bytes: f64,
    /// How many bytes the host has for stages that do not fit on the devices; `None` leaves them there.
    pub host_memory: Option<u64>,
    /// Time of the optimizer's update on the host, for each byte of parameters.
    pub home_update: f64,
    /// Whether updates on the host are computed ahead; `None` where they wait for their step.
    pub look_ahead: Option<LookAhead>,
    /// The schedules to choose from.
    pub schedules: Vec<Schedule>,
    /// The numbers of micro-batches to choose from.
    pub micro_batches: Vec<usize>,
    /// What every stage computes again; `None` chooses for each stage whether it keeps its activations.
    pub recompute: Option<Recompute>,
}

impl<'a> Request<'a> {
    /// Everything to choose from: all schedules, twelve numbers of micro-batches, and what each stage
    /// keeps.
    #[must_use]
    pub fn new(profile: &'a Profile, devices: Vec<PlanDevice>, samples: usize) -> Self {
        Self {
            profile,
            devices,
            samples,
            link: LinkCost::default(),
            bus: BusCost::default(),
            gradient_bytes: 1.0,
            sums_apart: true,
            optimizer_bytes: 0.0,
            host_memory: None,
            home_update: 0.0,
            look_ahead: None,
            schedules: Schedule::all(2).to_vec(),
            micro_batches: usual_micro_batches(samples),
            recompute: None,
        }
    }

    /// Every combination of what there is to choose from.
    pub(super) fn choices(&self) -> impl Iterator<Item = PlanChoice> {
        // What is not computed again is the fastest: more is only where that does not fit.
        let recompute = self.recompute.unwrap_or(Recompute::Never);
        self.schedules.iter().flat_map(move |&schedule| {
            let choice = move |&micro_batches| PlanChoice { schedule, micro_batches, recompute };
            self.micro_batches.iter().map(choice)
        })
    }

    /// What the host takes to look ahead at the updates of stages that live there, beside so many bytes that do; 0
    /// where there is no room, or nobody looks ahead.
    pub(super) fn ahead_bytes(&self, costs: &Costs, homes: &[StageHome], host_bytes: u64) -> u64 {
        let (Some(ahead), Some(memory)) = (self.look_ahead, self.host_memory) else { return 0 };
        // Optimizers of several devices wait for each other's gradients.
        if self.devices.len() > 1 {
            return 0;
        }
        let behind_first = costs.stages.iter().zip(homes).skip(1);
        let at_home = behind_first.filter(|(_, home)| home.weights == Home::Host);
        let weights: f64 = at_home.map(|(cost, _)| cost.home_bytes as f64).sum();
        let bytes = (weights * ahead.bytes) as u64;
        let taken = host_bytes.saturating_add(ahead.spared).saturating_add(bytes);
        if taken <= memory { bytes } else { 0 }
    }

    pub(super) fn check(&self) -> Result<(), PlanError> {
        let lists = [
            ("layers", self.profile.layers.is_empty()),
            ("devices", self.devices.is_empty()),
            ("samples", self.samples == 0),
            ("schedules", self.schedules.is_empty()),
            ("numbers of micro-batches", self.micro_batches.is_empty()),
        ];
        if let Some((what, _)) = lists.into_iter().find(|(_, is_empty)| *is_empty) {
            return Err(PlanError::Nothing { what });
        }
        let ahead = self.look_ahead.map_or(0.0, |ahead| ahead.bytes);
        let numbers = [
            ("gradients take", self.gradient_bytes, "bytes"),
            ("the optimizer takes", self.optimizer_bytes, "bytes"),
            ("the optimizer takes", ahead, "bytes"),
            ("the update on the host takes", self.home_update, ""),
        ];
        if let Some((what, value, unit)) = numbers.into_iter().find(|number| !is_time(number.1)) {
            return Err(PlanError::BadNumber { what, value, unit });
        }
        // Devices are checked by the balancer, which knows what a speed may be.
        Ok(self.profile.check()?)
    }
}

/// 1, 2, 3, 4, 6, 8, 12, … as far as there are samples: each half as large again as the one before,
/// or a third.
fn usual_micro_batches(samples: usize) -> Vec<usize> {
    let usual = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
    usual.into_iter().filter(|m| *m <= samples).collect()
}
