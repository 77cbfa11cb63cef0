//! BatchNorm statistics, as the command line names them.

use brimful::nn::BatchNormPolicy;
use clap::ValueEnum;

use super::shown_as_given;

/// What BatchNorms make of micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NormStatistics {
    /// The whole mini-batch normalises, whatever the cut, on one device
    Exact,
    /// Each micro-batch normalises itself; what evaluation uses moves once a step
    Deferred,
    /// The same, but it moves at every micro-batch
    PerMicroBatch,
    /// What evaluation uses normalises in training too, and never moves
    Frozen,
}

shown_as_given!(NormStatistics);

impl NormStatistics {
    pub fn policy(self) -> BatchNormPolicy {
        match self {
            Self::Exact => BatchNormPolicy::Exact,
            Self::Deferred => BatchNormPolicy::Deferred,
            Self::PerMicroBatch => BatchNormPolicy::PerMicroBatch,
            Self::Frozen => BatchNormPolicy::Frozen,
        }
    }
}
