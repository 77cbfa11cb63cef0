//! Caught failures as errors, and panics that are parked until everything is rolled back.

use std::any::Any;
use std::panic;
use std::time::Instant;

use crate::oom::{self, Caught};
use crate::workers::{into_error, panic_message};
use crate::{Error, Result};

/// Returns the error; resumes a panic that is not out-of-memory.
pub(crate) fn into_error_or_panic(caught: Caught<Error>) -> Error {
    match caught {
        Caught::Panic(payload) => panic::resume_unwind(payload),
        other => into_error(other),
    }
}

/// Runs `f`; a panic becomes an error, which can be reported to other ranks.
pub(crate) fn caught<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    oom::catch(f).map_err(into_error)
}

/// A failed attempt and its time: of several failures the first is reported.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) at: Instant,
    pub(crate) cause: Box<Caught<Error>>,
    /// True if another part has failed before, perhaps in another rank.
    pub(crate) follows: bool,
}

impl Failed {
    /// Creates a failure with this error, at this time.
    pub(crate) fn at(at: Instant, error: Error) -> Self {
        Self { at, cause: Box::new(Caught::Error(error)), follows: false }
    }

    /// Creates a failure that another one has caused; the other one is reported instead.
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

/// A user's panic that resumes once everything is rolled back and all ranks have the report.
#[derive(Default)]
pub(crate) struct ParkedPanic(Option<Box<dyn Any + Send>>);

impl ParkedPanic {
    /// Keeps a panic, and reports its message to the other ranks.
    pub(crate) fn park(&mut self, failed: Failed) -> Failed {
        match *failed.cause {
            Caught::Panic(payload) => {
                let message = panic_message(&*payload);
                self.0 = Some(payload);
                let error = Error::Panicked { message };
                Failed { cause: Box::new(Caught::Error(error)), ..failed }
            }
            cause => Failed { cause: Box::new(cause), ..failed },
        }
    }

    /// Resumes the panic, if there was one.
    pub(crate) fn resume(self) {
        if let Some(payload) = self.0 {
            panic::resume_unwind(payload);
        }
    }
}
