//! Retry after out-of-memory outside forward and backward: in optimizer steps, callbacks, or the saving of a
//! model.

use std::error::Error as StdError;

use crate::memory::Memory;
use crate::oom::{self, Caught, into_error_or_panic};
use crate::{Error, Result};

/// Runs `f` in this memory. If memory runs out, empties the cache and calls `f` once more.
///
/// `f` must allow a second call after a failure. The optimizers of this library do, because their steps are
/// atomic.
///
/// # Errors
///
/// When memory runs out again, and with any other error of `f`. A panic that is not out-of-memory resumes.
pub fn retry_on_oom<T, E>(memory: &Memory, mut f: impl FnMut() -> Result<T, E>) -> Result<T>
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
