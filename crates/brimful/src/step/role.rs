//! Role of a mini-batch in its step, and the source of its random numbers.

use tch::Device;

use crate::loss::MicroBatchWeight;
use crate::random::{Generator, StepRng};

/// Role of a mini-batch in its step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchRole {
    /// Divisor of the gradients while it runs: see [`MicroBatchWeight::unit`].
    pub(crate) unit: f64,
    /// True if it has the step's first sample.
    pub(crate) first: bool,
    /// True if it begins the step in its process: no earlier mini-batch waits for the commit.
    pub(crate) begins: bool,
    /// True if the unit is the step's number of samples, and no other mini-batch follows.
    pub(crate) last: bool,
    /// Seed of its random numbers; without one it draws as a plain loop does.
    pub(crate) seed: Option<PartSeed>,
}

impl BatchRole {
    /// Returns the weight of one of its micro-batches.
    pub(super) fn weight(self, number: usize, samples: usize) -> MicroBatchWeight {
        let first = self.first && number == 0;
        MicroBatchWeight { samples: samples as f64, unit: self.unit, first }
    }
}

/// Seed for the micro-batches of one replica or rank in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartSeed {
    pub(crate) seed: u64,
    /// Number of the replica or rank.
    pub(crate) part: usize,
}

impl PartSeed {
    /// Returns the generator of its micro-batches on this device.
    pub(crate) fn on(self, device: Device) -> PartGenerator {
        PartGenerator { seed: self, generator: Generator::new(device) }
    }
}

/// The generator of one replica or rank in one step.
pub(crate) struct PartGenerator {
    seed: PartSeed,
    generator: Generator,
}

impl PartGenerator {
    /// Seeds the generator for this micro-batch.
    pub(crate) fn begin(&self, micro_batch: usize) {
        let PartSeed { seed, part } = self.seed;
        self.generator.seed(StepRng::new(seed, micro_batch).seed(part));
    }
}
