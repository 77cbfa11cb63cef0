//! Meta tensors: a shape without memory, to measure a model before it exists.

use crate::ffi;
use crate::replaced::{GuardNumber, Replaced};

thread_local! {
    static FOUND: Replaced<bool> = const { Replaced::new() };
}

/// Makes this thread's new tensors meta tensors, without memory, until the guard is dropped.
///
/// Operations on them return meta tensors; reading a value is a libtorch error. A tensor made from host data
/// (`Tensor::from_slice`) is an ordinary one.
pub fn enter() -> MetaGuard {
    // SAFETY: changes a setting of this thread alone.
    let last = unsafe { ffi::brimful_meta_enter(true) };
    MetaGuard(Replaced::note(&FOUND, last))
}

/// Returns whether new tensors of this thread have no memory.
pub fn is_entered() -> bool {
    Replaced::is_noted(&FOUND)
}

/// Keeps new tensors without memory. Dropping the guard restores the previous state. Guards may be dropped in any
/// order: tensors have memory again when no guard is left.
#[derive(Debug)]
#[must_use = "tensors have memory again when the guard is dropped"]
pub struct MetaGuard(GuardNumber);

impl Drop for MetaGuard {
    fn drop(&mut self) {
        if let Some(last) = Replaced::leave(&FOUND, self.0, |_, _| true) {
            // SAFETY: as in `enter`; the guard cannot leave its thread.
            unsafe { ffi::brimful_meta_enter(last) };
        }
    }
}
