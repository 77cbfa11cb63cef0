//! What was caught, as an error; and panics that wait until all is undone.

use std::any::Any;
use std::panic;
use std::time::Instant;

use crate::oom::{self, Caught};
use crate::workers::{WorkerError, into_error, panic_message};
use crate::{Error, Result};

/// The error; a panic that is not out-of-memory goes on.
pub(crate) fn into_error_or_panic(caught: Caught<Error>) -> Error {
    match caught {
        Caught::Panic(payload) => panic::resume_unwind(payload),
        other => into_error(other),
    }
}

/// Runs `f`; a panic becomes an error, so that it can be told to others.
pub(crate) fn caught<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    oom::catch(f).map_err(into_error)
}

/// A try that has failed, and when: of several failures the first is told.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) at: Instant,
    pub(crate) cause: Box<Caught<Error>>,
    /// Whether somebody else has failed before, perhaps in another rank.
    pub(crate) follows: bool,
}

impl Failed {
    /// With this error, at this time.
    pub(crate) fn at(at: Instant, error: Error) -> Self {
        Self { at, cause: Box::new(Caught::Error(error)), follows: false }
    }

    /// Because somebody else did, who is to be told instead.
    pub(crate) fn stopped(error: Error) -> Self {
        Self { follows: true, ..error.into() }
    }
}

impl From<Caught<Error>> for Failed {
    fn from(cause: Caught<Error>) -> Self {
        Self { at: Instant::now(), cause: Box::new(cause), follows: false }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Caught::Error(error).into()
    }
}

/// A user's panic that goes on when all is undone and everyone has been told.
#[derive(Default)]
pub(crate) struct ParkedPanic(Option<Box<dyn Any + Send>>);

impl ParkedPanic {
    /// Keeps a panic, of which the others are told its words.
    pub(crate) fn park(&mut self, failed: Failed) -> Failed {
        match *failed.cause {
            Caught::Panic(payload) => {
                let message = panic_message(&*payload);
                self.0 = Some(payload);
                let error = WorkerError::Panicked { message }.into();
                Failed { cause: Box::new(Caught::Error(error)), ..failed }
            }
            cause => Failed { cause: Box::new(cause), ..failed },
        }
    }

    /// Lets the panic go on, if there was one.
    pub(crate) fn resume(self) {
        if let Some(payload) = self.0 {
            panic::resume_unwind(payload);
        }
    }
}
