//! Tensors that have a shape and no memory, to count a model before it exists.

use crate::ffi;
use crate::replaced::{GuardNumber, Replaced};

thread_local! {
    static FOUND: Replaced<bool> = const { Replaced::new() };
}

/// From here on this thread's new tensors have a shape and no memory, until the guard is dropped.
///
/// Calculating with them gives more of their kind; reading a value is an error of libtorch. A
/// tensor made of the host's data (`Tensor::from_slice`) is as always.
pub fn enter() -> MetaGuard {
    // SAFETY: it changes a setting of this thread alone.
    let last = unsafe { ffi::brimful_meta_enter(true) };
    MetaGuard(Replaced::note(&FOUND, last))
}

/// Whether this thread's new tensors have no memory.
pub fn is_entered() -> bool {
    Replaced::is_noted(&FOUND)
}

/// Keeps new tensors without memory; dropped, the state before holds again. Guards may be dropped in any order: they
/// have memory again when none is left.
#[derive(Debug)]
#[must_use = "tensors have memory again when the guard is dropped"]
pub struct MetaGuard(GuardNumber);

impl Drop for MetaGuard {
    fn drop(&mut self) {
        if let Some(last) = Replaced::leave(&FOUND, self.0, |_, _| true) {
            // SAFETY: as in `enter`; the guard cannot have left its thread.
            unsafe { ffi::brimful_meta_enter(last) };
        }
    }
}
