//! Tells layers whether they are being run a second time for the same micro-batch.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};

use crate::statistics::Pending;

thread_local! {
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the layer that asks is being run again for a backward, because its activations were not
/// kept. Random numbers are the same as the first time, and this library's BatchNorm counts once;
/// a layer with side effects of its own can ask here to have them once.
#[must_use]
pub fn is_recomputing() -> bool {
    RECOMPUTING.get()
}

/// Runs a forward again: layers can tell, and running statistics do not count it.
pub(crate) fn run_again<T>(f: impl FnOnce() -> T) -> T {
    // For layers' own effects; BatchNorm of this library is kept from counting by `collect`.
    RECOMPUTING.set(true);
    // A panic goes on only after the step's own statistics are back in their place.
    let (_, result) = Pending::collect(true, || panic::catch_unwind(AssertUnwindSafe(f)));
    RECOMPUTING.set(false);
    result.unwrap_or_else(|payload| panic::resume_unwind(payload))
}
