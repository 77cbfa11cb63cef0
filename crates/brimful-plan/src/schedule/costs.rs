//! Costs of actions: time and bytes for each stage, and the links.

use serde::{Deserialize, Serialize};

use super::{Action, ActionKind, CostError, StageId};

/// Costs of one micro-batch on one stage. All times have the same unit, whichever it is. Byte counts that are not
/// known are 0.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StageCost {
    /// Time of a forward.
    pub forward: f64,
    /// Time of a whole backward.
    pub backward: f64,
    /// Time of the input gradient of a split backward.
    pub input_gradient: f64,
    /// Time of the weight gradient.
    pub weight_gradient: f64,
    /// Time of recomputing the forward.
    pub recompute: f64,
    /// Bytes of the parameters, in use all the time.
    pub parameter_bytes: u64,
    /// Bytes of the summed gradients: from the stage's first backward until the step's end, or until they
    /// are on the host.
    pub gradient_bytes: u64,
    /// Bytes of the gradients to which sums of another dtype are cast on the device at the step's end. The
    /// sums are still there. 0 if the sums have the parameters' dtype.
    pub cast_bytes: u64,
    /// Bytes of one micro-batch's weight gradients, beside the sums, before they are added.
    pub fresh_bytes: u64,
    /// Bytes of one micro-batch's weight gradients that are converted at one time, after the backward, if the sums
    /// have another dtype.
    pub converted_bytes: u64,
    /// Bytes of the optimizer's state, in use all the time.
    pub optimizer_bytes: u64,
    /// Bytes that one micro-batch's forward keeps for its backward, without the stage's input.
    pub activation_bytes: u64,
    /// Peak bytes of a forward that keeps its activations, including the activations; ignored if below
    /// `activation_bytes`.
    pub forward_peak: u64,
    /// Peak bytes of a backward: activations, the gradients of the stage's output and input, and all else but
    /// gradients of weights; ignored if below the sum of activations and those two gradients.
    pub backward_peak: u64,
    /// Bytes that one micro-batch holds between its input gradient and its weight gradient, including the stage's
    /// input if the weight gradient needs that. If not known, as many as before the input gradient.
    pub split_bytes: Option<u64>,
    /// Bytes of one micro-batch's output, the boundary to the next stage.
    pub output_bytes: u64,
    /// Bytes of the weights in host memory if the stage is offloaded: trained weights, and the copy that is
    /// transferred.
    #[serde(alias = "home_bytes")]
    pub offloaded_bytes: u64,
    /// Bytes of the weights that are fetched into a device buffer if the stage is offloaded.
    pub fetched_bytes: u64,
    /// Bytes of the summed gradients that are sent to the host; if stages are updated in the backward, of the updated
    /// weights and the optimizer's state.
    pub sent_bytes: u64,
    /// Bytes that come with the weights for an update if the stage is offloaded: the optimizer's state, and the
    /// gradients unless they are on the device.
    #[serde(default)]
    pub update_in_bytes: u64,
    /// Bytes of updated weights and state that are sent back in the next step's forward, if stages are updated
    /// after the step.
    #[serde(default)]
    pub update_out_bytes: u64,
}

impl StageCost {
    /// Returns times without bytes: a whole backward takes as long as a split one, a recompute as long as a
    /// forward.
    #[must_use]
    pub fn new(forward: f64, input_gradient: f64, weight_gradient: f64) -> Self {
        Self {
            forward,
            backward: input_gradient + weight_gradient,
            input_gradient,
            weight_gradient,
            recompute: forward,
            ..Self::default()
        }
    }

    pub(crate) fn time(&self, kind: ActionKind) -> f64 {
        match kind {
            ActionKind::Forward => self.forward,
            ActionKind::Backward => self.backward,
            ActionKind::InputGradient => self.input_gradient,
            ActionKind::WeightGradient => self.weight_gradient,
            ActionKind::Recompute => self.recompute,
        }
    }

    /// Returns the bytes that are always in use.
    pub(crate) fn lasting_bytes(&self) -> u128 {
        u128::from(self.parameter_bytes) + u128::from(self.optimizer_bytes)
    }
}

/// Link from one device to another. It carries one boundary at a time, while the devices continue to
/// compute.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkCost {
    /// Time from the end of sending to the arrival.
    pub latency: f64,
    /// Bytes per unit of time; may be infinite.
    pub bandwidth: f64,
}

impl Default for LinkCost {
    /// Returns a link that takes no time.
    fn default() -> Self {
        Self { latency: 0.0, bandwidth: f64::INFINITY }
    }
}

/// Host link (PCIe) between a device and host memory; each device has its own. It carries one transfer at a
/// time in each direction, while the device continues to compute.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HostLinkCost {
    /// Bytes per unit of time to the device, while the other direction is idle; may be infinite.
    pub inward: f64,
    /// Bytes per unit of time to the host, while the other direction is idle; may be infinite.
    pub outward: f64,
    /// Bytes per unit of time in each direction, while both are in use; may be infinite.
    pub both: f64,
}

impl Default for HostLinkCost {
    /// Returns a link that takes no time.
    fn default() -> Self {
        Self::equal(f64::INFINITY)
    }
}

impl HostLinkCost {
    /// Returns a link with the same bandwidth in each direction, whether or not the other direction is in use.
    #[must_use]
    pub const fn equal(bandwidth: f64) -> Self {
        Self { inward: bandwidth, outward: bandwidth, both: bandwidth }
    }

    pub(crate) fn check(&self) -> Result<(), CostError> {
        let rates = [("inward", self.inward), ("outward", self.outward), ("both ways", self.both)];
        match rates.into_iter().find(|(_, rate)| rate.is_nan() || *rate <= 0.0) {
            Some((what, value)) => Err(CostError::BadHostLink { what, value }),
            None => Ok(()),
        }
    }
}

/// Costs of every stage.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Costs of each stage.
    pub stages: Vec<StageCost>,
    /// Bytes of one micro-batch at the input of the first stage.
    pub input_bytes: u64,
    /// Link between any two devices.
    pub link: LinkCost,
    /// Host link between a device and host memory.
    #[serde(alias = "bus")]
    pub host_link: HostLinkCost,
    /// Whether offloaded stages are updated in the backward. If so, the optimizer's state comes with a stage's
    /// last fetch, otherwise with its first.
    #[serde(default)]
    pub update_in_backward: bool,
}

impl Costs {
    /// Returns equal times for every stage, no bytes, and transfers that take no time.
    #[must_use]
    pub fn equal(stages: usize, cost: StageCost) -> Self {
        Self { stages: vec![cost; stages], ..Self::default() }
    }

    /// Returns one tick for each action, two for a whole backward, as in the text grid.
    #[must_use]
    pub fn ticks(stages: usize) -> Self {
        Self::equal(stages, StageCost::new(1.0, 1.0, 1.0))
    }

    /// Returns the costs of an action's stage.
    pub(crate) fn of(&self, action: Action) -> &StageCost {
        &self.stages[action.stage.index()]
    }

    pub(crate) fn time(&self, action: Action) -> f64 {
        self.of(action).time(action.kind)
    }

    /// Returns the bytes of one micro-batch at the input of a stage.
    pub(crate) fn input_bytes_of(&self, stage: StageId) -> u64 {
        let before = stage.index().checked_sub(1);
        before.map_or(self.input_bytes, |before| self.stages[before].output_bytes)
    }

    pub(crate) fn check(&self, stages: usize) -> Result<(), CostError> {
        if self.stages.len() != stages {
            return Err(CostError::WrongStages { given: self.stages.len(), needed: stages });
        }
        for (j, cost) in self.stages.iter().enumerate() {
            let mut times = ActionKind::ALL.into_iter().map(|kind| (kind.name(), cost.time(kind)));
            if let Some((what, value)) = times.find(|(_, value)| !is_time(*value)) {
                return Err(CostError::BadTime { stage: StageId::at(j), what, value });
            }
        }
        self.link.check()?;
        self.host_link.check()
    }
}

impl LinkCost {
    fn check(&self) -> Result<(), CostError> {
        let Self { latency, bandwidth } = *self;
        if !is_time(latency) {
            let must = "it must be finite and not negative";
            return Err(CostError::BadLink { what: "latency", value: latency, must });
        }
        if bandwidth.is_nan() || bandwidth <= 0.0 {
            let must = "it must be above 0 (infinite for a transfer that takes no time)";
            return Err(CostError::BadLink { what: "bandwidth", value: bandwidth, must });
        }
        Ok(())
    }
}

pub(crate) fn is_time(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}
