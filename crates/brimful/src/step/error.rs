//! Steps that cannot be taken, or not now.

use tch::Kind;
use thiserror::Error;

/// A step that cannot be taken, or not now.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StepError {
    /// A gradient that is infinite or no number.
    #[error(
        "a gradient is not finite from micro-batch {micro_batch} on: nothing was changed; lower the \
         learning rate or look at the data, or allow it by `NonFinite::RefuseLoss`"
    )]
    NonFiniteGradient {
        /// The micro-batch, counted from 0.
        micro_batch: usize,
    },
    /// A gradient that is infinite or no number as it was to be committed: summed up, divided and of this kind.
    #[error(
        "the gradient of '{parameter}' is not finite as {kind:?}: nothing was changed; lower the learning \
         rate or the factor of the loss, look at the data, or allow it by `NonFinite::RefuseLoss`"
    )]
    NonFiniteSum {
        /// The parameter's name.
        parameter: String,
        /// The gradient's kind.
        kind: Kind,
    },
    /// A number of tokens for samples that have none.
    #[error(
        "micro-batches of {tokens} tokens need sequences: put the samples into `batch::Sequences`, or \
         give a number of samples by `Size::Fixed`"
    )]
    NoSequences {
        /// What a micro-batch was to have.
        tokens: usize,
    },
    /// A commit of nothing.
    #[error("there is nothing to commit: call `accumulate` first")]
    NothingAccumulated,
    /// A whole step between the parts of another.
    #[error(
        "{samples} samples have been accumulated and not committed: call `commit` before the next \
         `backward`"
    )]
    WindowOpen {
        /// Samples that wait.
        samples: usize,
    },
    /// A window whose sums are of other parameters than those that are trained now.
    #[error(
        "{samples} samples have been accumulated for {then} trained parameters, and now {now} are, or \
         others: freeze and thaw parameters before a window's first `accumulate` or after its `commit`"
    )]
    TrainedChanged {
        /// Samples that wait.
        samples: usize,
        /// Parameters that were trained when the first of them were run.
        then: usize,
        /// Those that are trained now.
        now: usize,
    },
    /// What needs all samples in one process.
    #[error(
        "a loss over the whole mini-batch needs all samples in one process, but there are {ranks} \
         ranks: leave the world out, or use a loss that is a sum over samples"
    )]
    NotOverRanks {
        /// How many there are.
        ranks: usize,
    },
    /// Outputs that a loss over the whole mini-batch cannot be traced back through.
    #[error(
        "output {leaf} (counted from 0) cannot take a gradient in parts: return one row a sample, \
         and nothing in `Shared`"
    )]
    OutputNotRows {
        /// The output's place, counted from 0.
        leaf: usize,
    },
}
