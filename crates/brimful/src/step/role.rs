//! What a mini-batch is to its step, and where its random numbers come from.

use tch::Device;

use crate::loss::MicroBatchWeight;
use crate::random::{Draws, Generator};

/// What a mini-batch is to its step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchRole {
    /// What gradients are divided by while it runs: see [`MicroBatchWeight::unit`].
    pub(crate) unit: f64,
    /// Whether it has the step's first sample.
    pub(crate) first: bool,
    /// Whether it begins the step in its process: no other waits for its commit.
    pub(crate) begins: bool,
    /// Whether the unit is the step's number of samples, and no other mini-batch follows.
    pub(crate) last: bool,
    /// Random numbers of its own; without them it draws as a plain loop does.
    pub(crate) seed: Option<PartSeed>,
}

impl BatchRole {
    /// What its micro-batch of this number counts for.
    pub(super) fn weight(self, number: usize, samples: usize) -> MicroBatchWeight {
        let first = self.first && number == 0;
        MicroBatchWeight { samples: samples as f64, unit: self.unit, first }
    }
}

/// The random numbers of one replica or rank in one step, which belong to its micro-batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartSeed {
    pub(crate) seed: u64,
    /// Which replica or rank.
    pub(crate) part: usize,
}

impl PartSeed {
    /// What its micro-batches draw from on this device, while it lives.
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
    /// Lets the micro-batch draw from its own seed.
    pub(crate) fn begin(&self, micro_batch: usize) {
        let PartSeed { seed, part } = self.seed;
        self.generator.seed(Draws::new(seed, micro_batch).seed(part));
    }
}
