//! Errors of all modules; each says what happened, with the numbers and the remedy.

use std::error::Error as StdError;
use std::sync::Arc;
use std::{fmt, iter};

use brimful_plan::balance::BalanceError;
use brimful_plan::bytes::BytesError;
use brimful_plan::plan::PlanError;
use brimful_plan::schedule::{CostError, ScheduleError, TransferError};
use brimful_plan::split::SplitError;
use tch::TchError;
use thiserror::Error;

use crate::accumulate::{OtherLeaf, SparseGradient};
use crate::auto::DoesNotFit;
use crate::batch::BatchError;
use crate::device::NoDevice;
use crate::layers::LayersError;
use crate::loss::LossError;
use crate::memory::MemoryError;
use crate::nn::{BatchNormError, LinearCrossEntropyError, NormError};
use crate::oom::{self, OutOfMemory};
use crate::optim::OptimError;
use crate::pipeline::{PipelineError, StageError};
use crate::replicas::ReplicasError;
use crate::save::SaveError;
use crate::step::StepError;
use crate::workers::WorkerError;
use crate::world::WorldError;

/// Error of this library's calls.
///
/// The debug form is the message and those of its causes, as a `main` that returns it prints them.
#[derive(Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Memory ran out.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),

    /// Memory runs out at every size of micro-batches.
    #[error(transparent)]
    DoesNotFit(#[from] DoesNotFit),

    /// A rehearsal of an automatic size has ended, and must be rolled back. Never leaves the library.
    #[doc(hidden)]
    #[error("a rehearsal is over")]
    Rehearsed,

    /// A CUDA graph no longer does the same as the closure. Never leaves the library.
    #[doc(hidden)]
    #[error("what was captured is out of date")]
    OutOfDate,

    /// The system could not start a thread.
    #[error(
        "no thread could be started for {what}: {cause}; end other programs, or raise the limit (ulimit -u)"
    )]
    NoThread {
        /// Purpose of the thread.
        what: String,
        /// The system's message.
        cause: String,
    },

    /// libtorch refused a call, with its own message.
    #[error("libtorch: {0}")]
    Torch(String),

    /// A limit that a memory cannot have.
    #[error(transparent)]
    Memory(#[from] MemoryError),

    /// A device that this machine does not have.
    #[error(transparent)]
    NoDevice(#[from] NoDevice),

    /// A text that is not a number of bytes.
    #[error(transparent)]
    Bytes(#[from] BytesError),

    /// A batch that cannot be cut, lent or joined.
    #[error(transparent)]
    Batch(#[from] BatchError),

    /// Samples that cannot be cut as asked.
    #[error(transparent)]
    Split(SplitError),

    /// A loss from which no gradient of the mini-batch can be computed.
    #[error(transparent)]
    Loss(#[from] LossError),

    /// A sparse gradient.
    #[error(transparent)]
    SparseGradient(#[from] SparseGradient),

    /// A tensor besides the model's parameters that requires a gradient.
    #[error(transparent)]
    OtherLeaf(#[from] OtherLeaf),

    /// A step that cannot run, or not now.
    #[error(transparent)]
    Step(#[from] StepError),

    /// An input that does not fit a BatchNorm layer.
    #[error(transparent)]
    BatchNorm(#[from] BatchNormError),

    /// An input that does not fit a norm.
    #[error(transparent)]
    Norm(#[from] NormError),

    /// Tensors that do not fit a head's loss.
    #[error(transparent)]
    LinearCrossEntropy(#[from] LinearCrossEntropyError),

    /// An error of the user's own closure.
    #[error(transparent)]
    Closure(ClosureError),

    /// Parameters that cannot be optimized as asked.
    #[error(transparent)]
    Optim(#[from] OptimError),

    /// A file that cannot be read or written.
    #[error(transparent)]
    Save(#[from] SaveError),

    /// Layers that cannot be listed, built or run as asked.
    #[error(transparent)]
    Layers(#[from] LayersError),

    /// A schedule that cannot be made, read or run.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),

    /// Transfers between host and device that cannot be scheduled.
    #[error(transparent)]
    Transfers(#[from] TransferError),

    /// Costs that cannot be simulated.
    #[error(transparent)]
    Cost(#[from] CostError),

    /// Layers that cannot be spread over the stages.
    #[error(transparent)]
    Balance(#[from] BalanceError),

    /// A request that the planner cannot satisfy.
    #[error(transparent)]
    Plan(#[from] PlanError),

    /// A worker thread of a pipeline or of replicas that failed.
    #[error(transparent)]
    Workers(#[from] WorkerError),

    /// A pipeline that cannot be built or used as asked.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),

    /// Replicas that cannot be built.
    #[error(transparent)]
    Replicas(#[from] ReplicasError),

    /// A stage of a pipeline that failed.
    #[error(transparent)]
    Stage(Box<StageError>),

    /// A failure between ranks.
    #[error(transparent)]
    World(#[from] WorldError),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut reported = self.to_string();
        f.write_str(&reported)?;
        for cause in iter::successors(self.source(), |&error| error.source()) {
            let words = cause.to_string();
            // Many messages end in that of their cause.
            if !reported.ends_with(&words) {
                write!(f, "\n  because {words}")?;
                reported = words;
            }
        }
        Ok(())
    }
}

/// Error of a user's closure, unchanged.
#[derive(Debug, Clone, Error)]
#[error(transparent)]
pub struct ClosureError(pub Arc<dyn StdError + Send + Sync>);

impl PartialEq for ClosureError {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Error {
    /// Converts an error of the user's closure: errors of this library and of libtorch stay as they are, others
    /// keep their message.
    pub(crate) fn of_closure(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let error = match error.into().downcast::<Self>() {
            Ok(ours) => return *ours,
            Err(other) => other,
        };
        match error.downcast::<TchError>() {
            Ok(torch) => Self::from(*torch),
            Err(other) => match out_of_memory_in(&*other) {
                Some(oom) => Self::OutOfMemory(oom),
                None => Self::Closure(ClosureError(other.into())),
            },
        }
    }
}

/// Finds a report of out-of-memory in the error or its causes.
fn out_of_memory_in(error: &(dyn StdError + 'static)) -> Option<OutOfMemory> {
    oom::recognise(&error.to_string()).or_else(|| error.source().and_then(out_of_memory_in))
}

impl From<SplitError> for Error {
    fn from(error: SplitError) -> Self {
        match error {
            // One error for a batch without samples, whichever module finds it.
            SplitError::NoSamples => BatchError::Empty.into(),
            other => Self::Split(other),
        }
    }
}

impl Error {
    /// Creates the error of a thread that the system refused to start.
    pub(crate) fn no_thread(what: &str, cause: &std::io::Error) -> Self {
        Self::NoThread { what: what.to_owned(), cause: cause.to_string() }
    }
}

impl From<StageError> for Error {
    fn from(error: StageError) -> Self {
        Self::Stage(Box::new(error))
    }
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        let text = match error {
            TchError::Torch(text) => text,
            other => other.to_string(),
        };
        // The first line is the message, the rest a backtrace.
        let message = || text.lines().next().unwrap_or_default().to_owned();
        oom::recognise(&text).map_or_else(|| Self::Torch(message()), Self::OutOfMemory)
    }
}

impl From<brimful_torch::TorchError> for Error {
    fn from(error: brimful_torch::TorchError) -> Self {
        oom::from_torch(&error).map_or(Self::Torch(error.message), Self::OutOfMemory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Error with a cause.
    #[derive(Debug, Error)]
    #[error("the shelf is empty")]
    struct EmptyShelf(#[source] std::io::Error);

    #[test]
    fn a_main_that_returns_an_error_prints_its_message_with_the_remedy() {
        let error = Error::from(OptimError::NoGradient { parameters: 3 });
        let message = "none of the 3 parameters has a gradient: run backward first";
        assert_eq!(format!("{error:?}"), message);
        assert_eq!(format!("{error:#?}"), message);
        let error = Error::of_closure(EmptyShelf(std::io::Error::other("nobody went shopping")));
        assert_eq!(format!("{error:?}"), "the shelf is empty\n  because nobody went shopping");
    }

    #[test]
    fn an_error_of_tch_keeps_its_sentence_and_loses_its_backtrace() {
        let error = TchError::Torch("sizes differ\nException raised from cat\nframe #0".into());
        assert_eq!(Error::from(error), Error::Torch("sizes differ".into()));
        let error = Error::from(TchError::Torch("CUDA out of memory. Tried to allocate".into()));
        assert!(matches!(error, Error::OutOfMemory(_)), "{error:?}");
    }
}
