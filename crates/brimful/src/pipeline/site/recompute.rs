//! Marks activation recomputation, so that layers can ask for it.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};

use crate::statistics::Pending;

thread_local! {
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the layer that asks runs for activation recomputation. The random numbers are those of
/// the first run, and this library's BatchNorm counts once; a layer with side effects of its own can ask
/// here to have them only once.
#[must_use]
pub fn is_recomputing() -> bool {
    RECOMPUTING.get()
}

/// Runs a forward for activation recomputation: [`is_recomputing`] returns true, and running statistics do
/// not count it.
pub(crate) fn run_again<T>(f: impl FnOnce() -> T) -> T {
    // For the layers' own effects; `collect` keeps this library's BatchNorm from counting.
    RECOMPUTING.set(true);
    // A panic resumes only after the step's own statistics are back in place.
    let (_, result) = Pending::collect(true, || panic::catch_unwind(AssertUnwindSafe(f)));
    RECOMPUTING.set(false);
    result.unwrap_or_else(|payload| panic::resume_unwind(payload))
}
