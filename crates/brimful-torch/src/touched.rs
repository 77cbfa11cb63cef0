//! Recorded effects of a piece of work: its operations with their host-side arguments, and the outside memory
//! that it reads and writes.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use tch::Tensor;

use crate::at_end::AtEnd;
use crate::error::TorchError;
use crate::ffi::{self, RawFrozen, RawTensor, RawTouches};
use crate::{owned, raw_list};

/// Recorded effects of some work that are visible from outside.
#[derive(Debug, Default)]
pub struct Touched {
    /// Operations with their host-side numbers, as text. Work that depends only on its tensors has the same lines
    /// each time.
    pub operations: Vec<String>,
    /// True if an operation drew random numbers on the host.
    pub draws_on_host: bool,
    /// Blocks of memory that were only read and still exist, each whole, as bytes.
    pub read: Vec<Tensor>,
    /// Blocks of memory that were written to and still exist.
    pub written: Vec<Tensor>,
    /// Tensors that the work used while they did not require a gradient.
    pub frozen: Frozen,
}

/// Weak references to tensors that work used while they did not require a gradient.
#[derive(Debug)]
pub struct Frozen(*mut RawFrozen);

// SAFETY: the list holds weak pointers, which are as thread-safe as tensors, and has one owner.
unsafe impl Send for Frozen {}

impl Frozen {
    /// Returns whether one of these tensors requires a gradient by now.
    pub fn any_is_thawed(&self) -> bool {
        // SAFETY: the pointer is null, which is checked first, or a list that lives as long as `self`.
        !self.0.is_null() && unsafe { ffi::brimful_any_is_thawed(self.0) }
    }
}

impl Default for Frozen {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: the pointer is null, or a list that the bridge made and that is released only here.
        unsafe { ffi::brimful_forget_frozen(self.0) }
    }
}

/// Runs `f` and records the effects of its operations on this thread. The memory listed belongs to tensors that
/// existed before `f` or outlive it. Each operation takes some microseconds more.
///
/// Does not see work of autograd's own threads, which run backward on accelerators.
///
/// # Errors
/// When memory for the list runs out.
pub fn touched<T>(f: impl FnOnce() -> T) -> Result<(T, Touched), TorchError> {
    // SAFETY: on success the pointer is this thread's recording, which lives until `end` below, or until `drop`.
    let mut under_way = UnderWay(unsafe { ffi::brimful_touches_begin() }?);
    let value = f();
    Ok((value, under_way.end()?))
}

/// Runs `f` without recording its effects.
pub fn untold<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: null pauses this thread's recording, if there is one. The recording is restored before it can end.
    let paused = unsafe { ffi::brimful_touches_exchange(ptr::null_mut()) };
    let _goes_on = AtEnd(|| {
        // SAFETY: `paused` is null, or the recording of a `touched` that is still running on this thread.
        unsafe { ffi::brimful_touches_exchange(paused) };
    });
    f()
}

/// Returns whether one of these blocks has no other user: all tensors in it are gone.
pub fn any_is_left(blocks: &[Tensor]) -> bool {
    let blocks = raw_list(blocks);
    // SAFETY: the array has `blocks.len()` valid tensors.
    unsafe { ffi::brimful_any_is_left(blocks.as_ptr(), blocks.len()) }
}

/// Recording in progress; it also ends when dropped by a panic.
struct UnderWay(*mut RawTouches);

impl UnderWay {
    fn end(&mut self) -> Result<Touched, TorchError> {
        let list = std::mem::replace(&mut self.0, ptr::null_mut());
        let mut touched = Touched::default();
        let mut frozen = Frozen::default();
        let context = ptr::from_mut(&mut touched).cast();
        // SAFETY: the list is live and ends once, and the out-pointer for frozen tensors is valid. `ran` and
        // `found` are called only during this call, while nothing else uses `touched`.
        let draws_on_host =
            unsafe { ffi::brimful_touches_end(list, ran, found, context, &raw mut frozen.0) }?;
        Ok(Touched { draws_on_host, frozen, ..touched })
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // The recording is discarded.
            let _ = self.end();
        }
    }
}

extern "C" fn ran(context: *mut c_void, line: *const c_char) {
    // SAFETY: `context` points to the `touched` of the `UnderWay::end` that is running on this thread.
    let touched = unsafe { &mut *context.cast::<Touched>() };
    // SAFETY: the bridge passes a NUL-terminated text that is valid during the call.
    let line = unsafe { CStr::from_ptr(line) };
    touched.operations.push(line.to_string_lossy().into_owned());
}

extern "C" fn found(context: *mut c_void, bytes: *mut RawTensor, written: bool) {
    // SAFETY: `context` points to the `touched` of the `UnderWay::end` that is running on this thread.
    let touched = unsafe { &mut *context.cast::<Touched>() };
    let list = if written { &mut touched.written } else { &mut touched.read };
    list.push(owned(bytes));
}
