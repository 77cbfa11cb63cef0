//! Request to the planner: a model, devices, and the choices.

use crate::balance::Profile;
use crate::schedule::{HostLinkCost, LinkCost, Recompute, Schedule, is_time};

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
    /// Share of the parameters that is trained, and has gradients and optimizer state.
    pub trained: f64,
    /// Bytes of summed gradients for each byte of trained parameters: 1, or 2 if sums of half-precision
    /// gradients are in f32.
    pub gradient_bytes: f64,
    /// Bytes of a stage's gradients on the host for each byte of trained parameters; `None` stands for
    /// `gradient_bytes`.
    pub sent_gradient_bytes: Option<f64>,
    /// Whether a micro-batch's gradients are added to the sums after the backward of the whole stage, as on
    /// an accelerator and in half precision. Otherwise they are added after each layer. Offloaded stages
    /// always add them after the whole stage.
    pub sums_apart: bool,
    /// Bytes of optimizer state for each byte of trained parameters: 0 for plain SGD, 1 with momentum, 2 for
    /// Adam.
    pub optimizer_bytes: f64,
    /// Bytes of copies that stay where the parameters are, for each byte of trained parameters: averages of
    /// weights, and gradients of earlier mini-batches of a step.
    pub kept_bytes: f64,
    /// Bytes of host memory for stages that do not fit on the devices; `None` disables offloading.
    pub host_memory: Option<u64>,
    /// Whether offloaded stages are updated in the backward.
    pub update_in_backward: bool,
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
            trained: 1.0,
            gradient_bytes: 1.0,
            sent_gradient_bytes: None,
            sums_apart: true,
            optimizer_bytes: 0.0,
            kept_bytes: 0.0,
            host_memory: None,
            update_in_backward: false,
            schedules: Schedule::all(2).to_vec(),
            micro_batches: usual_micro_batches(samples),
            recompute: None,
        }
    }

    /// Returns every combination of schedules and numbers of micro-batches.
    pub(super) fn choices(&self) -> impl Iterator<Item = PlanChoice> {
        // A step without recomputation is fastest. A later search adds recomputation only if the step does not
        // fit.
        let recompute = self.recompute.unwrap_or(Recompute::Never);
        self.schedules.iter().flat_map(move |&schedule| {
            let choice = move |&micro_batches| PlanChoice { schedule, micro_batches, recompute };
            self.micro_batches.iter().map(choice)
        })
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
        let numbers = [
            ("share of trained parameters", self.trained),
            ("number of gradient bytes", self.gradient_bytes),
            ("number of sent gradient bytes", self.sent_gradient_bytes.unwrap_or_default()),
            ("number of optimizer bytes", self.optimizer_bytes),
            ("number of kept bytes", self.kept_bytes),
        ];
        if let Some((what, value)) = numbers.into_iter().find(|number| !is_time(number.1)) {
            return Err(PlanError::BadNumber { what, value });
        }
        // The balancer checks the devices, because it defines which speeds are valid.
        Ok(self.profile.check()?)
    }
}

/// Returns 1, 2, 3, 4, 6, 8, 12, … up to 64 or the number of samples. From 2 on, each number is larger than the
/// one before by a half or a third.
fn usual_micro_batches(samples: usize) -> Vec<usize> {
    let usual = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
    usual.into_iter().filter(|m| *m <= samples).collect()
}
