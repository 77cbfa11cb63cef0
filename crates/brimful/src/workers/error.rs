//! What goes wrong with a thread itself, whatever it was doing.

use std::any::Any;

use thiserror::Error;

use crate::Error;
use crate::oom::{self, Caught};

/// A thread of a pipeline or of replicas that failed as such.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// A panic where none was expected.
    #[error("a worker panicked: {message}; what it was doing was undone")]
    Panicked {
        /// Its words.
        message: String,
    },
    /// A call to the workers by what they run, which would wait for itself.
    #[error(
        "a pipeline's optimizer or averages were used inside one of its own steps, which would wait for \
         itself: use them when the step is over"
    )]
    InStep,
    /// A thread that has ended.
    #[error("the thread of device {worker} has ended: build the pipeline or the replicas again")]
    Gone {
        /// Which one, counted from 0.
        worker: usize,
    },
}

/// The error that a guarded call has ended with. tch turns numbers into tensors by calls that panic
/// where memory runs out, so a panic may be just that.
pub(crate) fn into_error(caught: Caught<Error>) -> Error {
    match caught {
        Caught::OutOfMemory(oom) => oom.into(),
        Caught::Error(error) => error,
        Caught::Panic(payload) => {
            WorkerError::Panicked { message: panic_message(&*payload) }.into()
        }
    }
}

/// What a panic says.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    oom::panic_words(payload).unwrap_or_else(|| "without a word".to_owned())
}
