//! What an action costs: time and bytes, for each stage, and the link between devices.

use serde::{Deserialize, Serialize};

use super::{Action, ActionKind, CostError, StageId};

/// What one micro-batch costs on one stage. Times are in any one unit; a missing byte count is 0.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StageCost {
    /// Time of a forward.
    pub forward: f64,
    /// Time of a whole backward.
    pub backward: f64,
    /// Time of the first half of a split backward.
    pub input_gradient: f64,
    /// Time of the second half.
    pub weight_gradient: f64,
    /// Time of running the forward again.
    pub recompute: f64,
    /// Time of the optimizer's update where the stage lives on the host; once a step, behind the next
    /// step's forward, one stage after the other.
    pub home_update: f64,
    /// Bytes of the parameters, there all the time.
    pub parameter_bytes: u64,
    /// Bytes of the sums of their gradients: there from the stage's first backward until the step's end, or
    /// until they are on the host.
    pub gradient_bytes: u64,
    /// Bytes of the gradients that sums of another number type become on the device at the step's end, beside
    /// the sums; 0 where the sums are of the parameters' type.
    pub cast_bytes: u64,
    /// Bytes of one micro-batch's gradients of the weights that are beside the sums before they are added.
    pub fresh_bytes: u64,
    /// Bytes that these are converted to at one time, where the sums are of another type: when their backward is
    /// over.
    pub converted_bytes: u64,
    /// Bytes of the optimizer's state, there all the time.
    pub optimizer_bytes: u64,
    /// Bytes that one micro-batch's forward keeps for its backward, without the stage's input.
    pub activation_bytes: u64,
    /// The most bytes while a forward that keeps them runs, these among them; fewer are not known.
    pub forward_peak: u64,
    /// The most bytes while a backward runs: what was kept, the gradients of the stage's output and of its
    /// input, and all else but gradients of weights; fewer are not known.
    pub backward_peak: u64,
    /// Bytes that one micro-batch holds between the halves of its backward, the stage's input among them
    /// where the second half needs it; if not known, as many as before the first one.
    pub split_bytes: Option<u64>,
    /// Bytes of one micro-batch's output, the boundary to the next stage.
    pub output_bytes: u64,
    /// Bytes of the weights at home, where the stage lives on the host: those that are trained, and the
    /// copy that crosses the bus.
    pub home_bytes: u64,
    /// Bytes of the weights as they cross the bus into a slot, where the stage lives on the host.
    pub fetched_bytes: u64,
    /// Bytes of the summed gradients as they cross the bus home.
    pub sent_bytes: u64,
}

impl StageCost {
    /// Times alone: a whole backward takes as long as its two halves, a recompute as long as a
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

    /// The bytes that are there whatever runs.
    pub(crate) fn lasting_bytes(&self) -> u128 {
        u128::from(self.parameter_bytes) + u128::from(self.optimizer_bytes)
    }
}

/// The way from one device to another. Each carries one boundary at a time, while the devices go on
/// working.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkCost {
    /// Time from the end of sending to the arrival.
    pub latency: f64,
    /// Bytes per unit of time; may be infinite.
    pub bandwidth: f64,
}

impl Default for LinkCost {
    /// A link that takes no time.
    fn default() -> Self {
        Self { latency: 0.0, bandwidth: f64::INFINITY }
    }
}

/// The way between a device and host memory; each device has one of its own. It carries one move at
/// a time in each direction, while the device goes on working.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BusCost {
    /// Bytes per unit of time to the device, while nothing goes the other way; may be infinite.
    pub inward: f64,
    /// Bytes per unit of time to the host, while nothing goes the other way; may be infinite.
    pub outward: f64,
    /// Bytes per unit of time in each direction, while both are in use; may be infinite.
    pub both: f64,
}

impl Default for BusCost {
    /// A bus that takes no time.
    fn default() -> Self {
        Self::equal(f64::INFINITY)
    }
}

impl BusCost {
    /// As fast in each direction, whatever goes in the other.
    #[must_use]
    pub const fn equal(bandwidth: f64) -> Self {
        Self { inward: bandwidth, outward: bandwidth, both: bandwidth }
    }

    pub(crate) fn check(&self) -> Result<(), CostError> {
        let rates = [("inward", self.inward), ("outward", self.outward), ("both ways", self.both)];
        match rates.into_iter().find(|(_, rate)| rate.is_nan() || *rate <= 0.0) {
            Some((what, value)) => Err(CostError::BadBus { what, value }),
            None => Ok(()),
        }
    }
}

/// The costs of every stage.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// One for each stage.
    pub stages: Vec<StageCost>,
    /// Bytes of one micro-batch at the entrance of the first stage.
    pub input_bytes: u64,
    /// The way between any two devices.
    pub link: LinkCost,
    /// The way between a device and host memory.
    pub bus: BusCost,
}

impl Costs {
    /// The same times on every stage, no bytes, and transfers that take no time.
    #[must_use]
    pub fn equal(stages: usize, cost: StageCost) -> Self {
        Self { stages: vec![cost; stages], ..Self::default() }
    }

    /// One tick for each action, two for a whole backward: what the text grid is drawn with.
    #[must_use]
    pub fn ticks(stages: usize) -> Self {
        Self::equal(stages, StageCost::new(1.0, 1.0, 1.0))
    }

    /// Those of an action's stage.
    pub(crate) fn of(&self, action: Action) -> &StageCost {
        &self.stages[action.stage.index()]
    }

    pub(crate) fn time(&self, action: Action) -> f64 {
        self.of(action).time(action.kind)
    }

    /// Bytes of one micro-batch at the entrance of a stage.
    pub(crate) fn input_bytes_of(&self, stage: StageId) -> u64 {
        let before = stage.index().checked_sub(1);
        before.map_or(self.input_bytes, |before| self.stages[before].output_bytes)
    }

    pub(crate) fn check(&self, stages: usize) -> Result<(), CostError> {
        if self.stages.len() != stages {
            return Err(CostError::WrongStages { given: self.stages.len(), needed: stages });
        }
        for (j, cost) in self.stages.iter().enumerate() {
            let actions = ActionKind::ALL.map(|kind| (kind.name(), cost.time(kind)));
            let mut times = actions.into_iter().chain([("update", cost.home_update)]);
            if let Some((what, value)) = times.find(|(_, value)| !is_time(*value)) {
                return Err(CostError::BadTime { stage: StageId::at(j), what, value });
            }
        }
        self.link.check()?;
        self.bus.check()
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
