//! BatchNorm statistics, as the command line names them.

use brimful::nn::BatchNormPolicy;
use clap::ValueEnum;

use super::shown_as_given;

/// Statistics that BatchNorms normalise with in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NormStatistics {
    /// Statistics of the whole mini-batch, whatever the micro-batch size; one device only
    Exact,
    /// Statistics of each micro-batch; running statistics are updated once per step
    Deferred,
    /// Statistics of each micro-batch; running statistics are updated at every micro-batch
    PerMicroBatch,
    /// Running statistics, which are not updated
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
