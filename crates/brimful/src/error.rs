//! Errors of all modules; each says what happened, with the numbers and the remedy.

use std::error::Error as StdError;
use std::sync::Arc;
use std::{fmt, iter};

use brimful_plan::balance::BalanceError;
use brimful_plan::bytes::{Bytes, BytesError};
use brimful_plan::plan::PlanError;
use brimful_plan::schedule::{Action, CostError, ScheduleError, TransferError};
use brimful_plan::split::SplitError;
use tch::TchError;
use thiserror::Error;

use crate::batch::{BatchError, enumerate};
use crate::layers::LayersError;
use crate::loss::LossError;
use crate::nn::NnError;
use crate::oom::{self, OutOfMemory};
use crate::pipeline::PipelineError;
use crate::replicas::ReplicasError;
use crate::step::StepError;
use crate::update::OptimError;
use crate::world::WorldError;

/// Error of this library's calls.
///
/// The debug form, which `main` prints of an error that it returns, is the message and the messages of its
/// causes.
#[derive(Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Memory ran out.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),

    /// Memory runs out at every size of micro-batches.
    #[error(
        "memory runs out even with a micro-batch of one sample ({}): {}{available} free; \
         recompute activations, take a smaller model or dtype, or spread the layers over \
         more devices. The last error: {}",
        tried_in_words(tried),
        needed.map(|needed| format!("more than {needed} needed, ")).unwrap_or_default(),
        cause.message
    )]
    DoesNotFit {
        /// Sizes that were tried.
        tried: Vec<usize>,
        /// Predicted need of one sample, if it is known.
        needed: Option<Bytes>,
        /// Bytes that were free.
        available: Bytes,
        /// Error of the last size that was tried.
        cause: Box<OutOfMemory>,
    },

    /// The end of an automatic size's rehearsal, which must be rolled back. Never leaves the library.
    #[doc(hidden)]
    #[error("a rehearsal is over")]
    Rehearsed,

    /// A CUDA graph whose work is no longer that of its closure. Never leaves the library.
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

    /// A memory limit of 0.
    #[error(
        "{memory} cannot have a limit of 0 bytes: set at least what the model needs, or no limit"
    )]
    LimitOfZero {
        /// Name of the arena or the device.
        memory: String,
    },

    /// A memory limit below the bytes in use.
    #[error(
        "{memory} cannot be limited to {limit}: {in_use} are in use; free tensors first or set the \
         limit to at least that"
    )]
    LimitBelowUse {
        /// Name of the arena or the device.
        memory: String,
        /// Requested limit.
        limit: Bytes,
        /// Bytes in use.
        in_use: Bytes,
    },

    /// A device that this machine does not have.
    #[error("there is no device '{asked}' here; there is {available}{hint}")]
    NoDevice {
        /// The requested name.
        asked: String,
        /// The available names.
        available: String,
        /// A likely cause, if one is known.
        hint: String,
    },

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

    /// A sparse gradient, which neither sums over micro-batches nor optimizers support.
    #[error(
        "the gradient of '{parameter}' is sparse: nothing was changed; build its layer with \
         `sparse: false`"
    )]
    SparseGradient {
        /// The parameter's name.
        parameter: String,
    },

    /// A tensor besides the model's parameters that requires a gradient.
    #[error(
        "the loss depends on a tensor of shape {shape:?} that requires a gradient and is not a parameter of \
         the model: nothing was changed; make it a variable of the model, or detach it. To compute its gradient, use \
         a `MicroBatcher` without a world, or `Pipeline::forward` and `backward_from`"
    )]
    OtherLeaf {
        /// The tensor's shape.
        shape: Vec<i64>,
    },

    /// A step that cannot run, or cannot run now.
    #[error(transparent)]
    Step(#[from] StepError),

    /// An input that a layer or a head's loss cannot take.
    #[error(transparent)]
    Nn(#[from] NnError),

    /// An error of the user's own closure.
    #[error(transparent)]
    Closure(ClosureError),

    /// Parameters that cannot be optimized as asked.
    #[error(transparent)]
    Optim(#[from] OptimError),

    /// A file that cannot be read or written.
    #[error("cannot {action} '{path}': {reason}")]
    File {
        /// Attempted action: `read` or `write`.
        action: &'static str,
        /// Path of the file.
        path: String,
        /// Reason of the failure.
        reason: String,
    },

    /// A file that does not contain complete tensors.
    #[error("'{path}' is damaged, or not a safetensors file: {reason}")]
    NotTensors {
        /// Path of the file.
        path: String,
        /// Reason.
        reason: String,
    },

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

    /// A panic on a worker thread of a pipeline or of replicas.
    #[error("a worker panicked: {message}; its work was rolled back")]
    Panicked {
        /// The panic's message.
        message: String,
    },

    /// A worker thread that has ended.
    #[error("the thread of device {worker} has ended: build the pipeline or the replicas again")]
    WorkerGone {
        /// Index of the device, from 0.
        worker: usize,
    },

    /// A call to a pipeline's optimizer or averages by code that the pipeline's workers run.
    #[error(
        "a pipeline's optimizer or averages were used inside a step of that pipeline, which would then never \
         end: use them after the step"
    )]
    InStep,

    /// A pipeline that cannot be built or used as asked.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),

    /// Replicas that cannot be built.
    #[error(transparent)]
    Replicas(#[from] ReplicasError),

    /// A stage of a pipeline that failed: the step was undone, and the pipeline can be used again.
    #[error(
        "stage {} failed in the {} of micro-batch {}{}: {cause}",
        action.stage,
        action.kind.name(),
        action.micro_batch,
        layer.as_ref().map(|layer| format!(", in layer '{layer}'")).unwrap_or_default()
    )]
    Stage {
        /// Action that the stage was running, with its micro-batch.
        action: Action,
        /// Layer that was running; none in a backward, a transfer or the loss.
        layer: Option<String>,
        /// Cause. It is not a `source`, because the message includes it already.
        cause: Box<Error>,
    },

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
            // Many messages end in the message of their cause.
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

fn tried_in_words(sizes: &[usize]) -> String {
    match sizes {
        [] => "before the first one was run".into(),
        sizes => format!("tried {}", enumerate(sizes)),
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
