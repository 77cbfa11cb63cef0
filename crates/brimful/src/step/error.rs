//! Errors of steps that cannot run, or cannot run now.

use tch::Kind;
use thiserror::Error;

/// A step that cannot run, or cannot run now.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StepError {
    /// A gradient that is not finite.
    #[error(
        "a gradient is not finite, first in micro-batch {micro_batch}: nothing was changed; lower the \
         learning rate, check the data, or set `NonFinitePolicy::RefuseLoss`, which refuses only \
         non-finite losses"
    )]
    NonFiniteGradient {
        /// The micro-batch, counted from 0.
        micro_batch: usize,
    },
    /// A gradient that is not finite once it is summed up, divided and cast to this dtype.
    #[error(
        "the gradient of '{parameter}' is not finite in {kind:?}: nothing was changed; lower the learning rate \
         or the loss scale, check the data, or set `NonFinitePolicy::RefuseLoss`, which refuses only \
         non-finite losses"
    )]
    NonFiniteSum {
        /// The parameter's name.
        parameter: String,
        /// The gradient's dtype.
        kind: Kind,
    },
    /// A size in tokens for samples that are not sequences.
    #[error(
        "micro-batches of {tokens} tokens need sequences: put the samples into `batch::Sequences`, or \
         give a number of samples by `MicroBatches::Samples`"
    )]
    NoSequences {
        /// Tokens that a micro-batch was to have.
        tokens: usize,
    },
    /// A commit with no accumulated mini-batch.
    #[error("there is nothing to commit: call `accumulate` first")]
    NothingAccumulated,
    /// A whole step while an accumulation window is open.
    #[error(
        "{samples} samples have been accumulated and not committed: call `commit` before the next \
         `backward`"
    )]
    WindowOpen {
        /// Samples that wait for the commit.
        samples: usize,
    },
    /// A window whose sums belong to another set of parameters than is trained now.
    #[error(
        "{samples} samples were accumulated for {then} parameters, but a different set ({now}) is trained \
         now: freeze and unfreeze parameters before a window's first `accumulate` or after its `commit`"
    )]
    TrainedChanged {
        /// Samples that wait for the commit.
        samples: usize,
        /// Parameters that were trained when the window began.
        then: usize,
        /// Parameters that are trained now.
        now: usize,
    },
    /// A loss over the whole mini-batch, whose samples are spread over ranks.
    #[error(
        "a loss over the whole mini-batch needs all samples in one process, but there are {ranks} \
         ranks: leave the world out, or use a loss that is a sum over samples"
    )]
    NotOverRanks {
        /// Number of ranks.
        ranks: usize,
    },
    /// An output through which a loss over the whole mini-batch cannot run backward.
    #[error(
        "output {leaf} (counted from 0) cannot be split by sample along dimension 0: return one row per sample, and \
         nothing in `Shared`"
    )]
    OutputNotRows {
        /// The output's index, counted from 0.
        leaf: usize,
    },
}
