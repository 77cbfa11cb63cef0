//! Runs what is outside forward and backward once more where memory ran out: optimizer steps,
//! callbacks, the saving of a model.

use std::error::Error as StdError;

use crate::memory::Memory;
use crate::oom::{self, Caught};
use crate::step::into_error_or_panic;
use crate::{Error, Result};

/// Runs `f` in the memory. Where it runs out, the cache is emptied and `f` is called once more.
///
/// `f` must be such that it may be called again after it has failed: the optimizers of this library
/// are, because a step of theirs is whole or not taken.
///
/// # Errors
/// When memory runs out again, and with any other error of `f`. Any other panic goes on.
pub fn guard<T, E>(memory: &Memory, mut f: impl FnMut() -> Result<T, E>) -> Result<T>
where
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    let _inside = memory.enter();
    let mut f = || f().map_err(Error::of_closure);
    match oom::catch(&mut f) {
        Err(Caught::OutOfMemory(error)) => {
            tracing::warn!(%error, "memory ran out outside a step: the cache is emptied for one more try");
            memory.empty_cache()?;
            oom::catch(f)
        }
        ended => ended,
    }
    .map_err(into_error_or_panic)
}
