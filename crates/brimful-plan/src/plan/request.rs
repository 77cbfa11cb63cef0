//! Request to the planner: a model, devices, and the choices.

use crate::balance::Profile;
use crate::schedule::{
    Costs, HostLinkCost, LinkCost, Location, Recompute, Schedule, StageLocation, is_time,
};

use super::{PlanChoice, PlanError};

/// Device as the planner sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanDevice {
    /// Speed; the profile's times are divided by it.
    pub speed: f64,
    /// Memory in bytes; `None` for no limit.
    pub memory: Option<u64>,
}

impl Default for PlanDevice {
    /// Returns a device as fast as the profiled one, without a limit.
    fn default() -> Self {
        Self { speed: 1.0, memory: None }
    }
}

/// Optimizer of offloaded stages that computes updates early, in a second copy of the state, while the
/// backward continues.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LookAhead {
    /// Bytes of the second copy, for each byte of parameters except the first stage's.
    pub bytes: f64,
    /// Bytes of host memory that must stay free: otherwise it does not compute updates early.
    pub spared: u64,
}

/// Request to the planner.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// Profile of the model.
    pub profile: &'a Profile,
    /// Devices, in the order of the pipeline.
    pub devices: Vec<PlanDevice>,
    /// Number of samples in the mini-batch.
    pub samples: usize,
    /// Link between two devices.
    pub link: LinkCost,
    /// Host link (PCIe) between a device and host memory.
    pub host_link: HostLinkCost,
    /// Bytes of summed gradients for each byte of parameters: 1, or 2 if sums of half-precision gradients
    /// are in f32.
    pub gradient_bytes: f64,
    /// Whether a micro-batch's gradients are added to the sums after a stage's backward, as on an
    /// accelerator and in half precision; otherwise after each layer. Offloaded stages always do the
    /// former.
    pub sums_apart: bool,
    /// Bytes of optimizer state for each byte of parameters: 0 for plain SGD, 1 with momentum, 2 for Adam.
    pub optimizer_bytes: f64,
    /// Bytes of host memory for stages that do not fit on the devices; `None` disables offloading.
    pub host_memory: Option<u64>,
    /// Time of the optimizer's update on the host, for each byte of parameters.
    pub host_update: f64,
    /// Optimizer that computes updates on the host early; `None` if updates wait for their step.
    pub look_ahead: Option<LookAhead>,
    /// Schedules to choose from.
    pub schedules: Vec<Schedule>,
    /// Numbers of micro-batches to choose from.
    pub micro_batches: Vec<usize>,
    /// Recomputation of every stage; `None` chooses for each stage whether it keeps its activations.
    pub recompute: Option<Recompute>,
}

impl<'a> Request<'a> {
    /// Returns a request with all choices: all schedules, twelve numbers of micro-batches, and the
    /// recomputation of each stage.
    #[must_use]
    pub fn new(profile: &'a Profile, devices: Vec<PlanDevice>, samples: usize) -> Self {
        Self {
            profile,
            devices,
            samples,
            link: LinkCost::default(),
            host_link: HostLinkCost::default(),
            gradient_bytes: 1.0,
            sums_apart: true,
            optimizer_bytes: 0.0,
            host_memory: None,
            host_update: 0.0,
            look_ahead: None,
            schedules: Schedule::all(2).to_vec(),
            micro_batches: usual_micro_batches(samples),
            recompute: None,
        }
    }

    /// Returns every combination of schedules and numbers of micro-batches.
    pub(super) fn choices(&self) -> impl Iterator<Item = PlanChoice> {
        // Without recomputation a step is fastest: a later search adds it only if the step does not fit.
        let recompute = self.recompute.unwrap_or(Recompute::Never);
        self.schedules.iter().flat_map(move |&schedule| {
            let choice = move |&micro_batches| PlanChoice { schedule, micro_batches, recompute };
            self.micro_batches.iter().map(choice)
        })
    }

    /// Returns the bytes of the second copy for early updates of offloaded stages, beside `host_bytes` of
    /// offloaded data; 0 if they do not fit, or updates are not computed early.
    pub(super) fn ahead_bytes(
        &self,
        costs: &Costs,
        locations: &[StageLocation],
        host_bytes: u64,
    ) -> u64 {
        let (Some(ahead), Some(memory)) = (self.look_ahead, self.host_memory) else { return 0 };
        // Optimizers of several devices wait for each other's gradients.
        if self.devices.len() > 1 {
            return 0;
        }
        let behind_first = costs.stages.iter().zip(locations).skip(1);
        let on_host = behind_first.filter(|(_, location)| location.weights == Location::Host);
        let weights: f64 = on_host.map(|(cost, _)| cost.offloaded_bytes as f64).sum();
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
            ("number of gradient bytes", self.gradient_bytes),
            ("number of optimizer bytes", self.optimizer_bytes),
            ("number of bytes of precomputed updates", ahead),
            ("time of the update on the host", self.host_update),
        ];
        if let Some((what, value)) = numbers.into_iter().find(|number| !is_time(number.1)) {
            return Err(PlanError::BadNumber { what, value });
        }
        // The balancer checks the devices, because it defines which speeds are valid.
        Ok(self.profile.check()?)
    }
}

/// Returns 1, 2, 3, 4, 6, 8, 12, … up to the number of samples: each is larger than the one before by a
/// half or a third.
fn usual_micro_batches(samples: usize) -> Vec<usize> {
    let usual = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
    usual.into_iter().filter(|m| *m <= samples).collect()
}
