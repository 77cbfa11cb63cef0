//! Converts failures on worker threads to errors.

use std::any::Any;

use crate::Error;
use crate::oom::{self, Caught};

/// Converts a caught failure to an error. tch panics if memory runs out when it converts a number to a tensor,
/// so a panic may be out of memory.
pub(crate) fn into_error(caught: Caught<Error>) -> Error {
    match caught {
        Caught::OutOfMemory(oom) => oom.into(),
        Caught::Error(error) => error,
        Caught::Panic(payload) => Error::Panicked { message: panic_message(&*payload) },
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    oom::panic_words(payload).unwrap_or_else(|| "without a word".to_owned())
}
