//! Errors of the worker threads themselves.

use std::any::Any;

use thiserror::Error;

use crate::Error;
use crate::oom::{self, Caught};

/// Failure of a thread of a pipeline or of replicas.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// Unexpected panic.
    #[error("a worker panicked: {message}; its work was rolled back")]
    Panicked {
        /// Its message.
        message: String,
    },
    /// Call to the workers by code that they run, which would wait for itself.
    #[error(
        "a pipeline's optimizer or averages were used inside a step of that pipeline, which would then never \
         end: use them after the step"
    )]
    InStep,
    /// Thread that has ended.
    #[error("the thread of device {worker} has ended: build the pipeline or the replicas again")]
    Gone {
        /// Index of the device, from 0.
        worker: usize,
    },
}

/// Converts the failure of a guarded call to an error. tch converts numbers to tensors by calls that panic
/// when memory runs out, so a panic may be out of memory.
pub(crate) fn into_error(caught: Caught<Error>) -> Error {
    match caught {
        Caught::OutOfMemory(oom) => oom.into(),
        Caught::Error(error) => error,
        Caught::Panic(payload) => {
            WorkerError::Panicked { message: panic_message(&*payload) }.into()
        }
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    oom::panic_words(payload).unwrap_or_else(|| "without a word".to_owned())
}
