//! Tensors that have a shape and no memory, to count a model before it exists.

use std::marker::PhantomData;

use crate::ffi;

/// From here on this thread's new tensors have a shape and no memory, until the guard is dropped.
///
/// Calculating with them gives more of their kind; reading a value is an error of libtorch. A
/// tensor made of the host's data (`Tensor::from_slice`) is as always.
pub fn enter() -> MetaGuard {
    // SAFETY: it changes a setting of this thread alone.
    let last = unsafe { ffi::brimful_meta_enter(true) };
    MetaGuard { last, _this_thread: PhantomData }
}

/// Keeps new tensors without memory; dropped, the state before holds again.
#[derive(Debug)]
#[must_use = "tensors have memory again when the guard is dropped"]
pub struct MetaGuard {
    last: bool,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for MetaGuard {
    fn drop(&mut self) {
        // SAFETY: as in `enter`; the guard cannot have left its thread.
        unsafe { ffi::brimful_meta_enter(self.last) };
    }
}
