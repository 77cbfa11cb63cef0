//! What a piece of work does: its operations with the host's numbers, and which memory it reads and
//! writes, of what outlives it.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use tch::Tensor;

use crate::at_end::AtEnd;
use crate::error::TorchError;
use crate::ffi::{self, RawFrozen, RawTensor, RawTouches};
use crate::{owned, raw_list};

/// What work has done, of what can be seen from outside.
#[derive(Debug, Default)]
pub struct Touched {
    /// Each operation with the numbers that it got from the host, in words. Work that depends on its
    /// tensors alone has the same lines each time.
    pub operations: Vec<String>,
    /// Whether one of them took random numbers of the host.
    pub draws_on_host: bool,
    /// Memory that was read alone and is still there, each block whole, as bytes.
    pub read: Vec<Tensor>,
    /// The same of memory that was written to.
    pub written: Vec<Tensor>,
    /// The tensors of these for which no gradient was wanted.
    pub frozen: Frozen,
}

/// Tensors that work has used while no gradient was wanted for them. It does not keep them alive.
#[derive(Debug)]
pub struct Frozen(*mut RawFrozen);

// SAFETY: it is weak pointers, which count as tensors do, and it is used through one owner.
unsafe impl Send for Frozen {}

impl Frozen {
    /// Whether one of them is to get a gradient by now.
    pub fn any_is_thawed(&self) -> bool {
        // SAFETY: null, or a list that lives as long as `self`.
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
        // SAFETY: null, or made by the bridge and given back once.
        unsafe { ffi::brimful_forget_frozen(self.0) }
    }
}

/// Runs `f`, and tells what its operations on this thread have done: the memory is that of tensors
/// which were there before, and of those that `f` leaves behind. Each operation takes some
/// microseconds more.
///
/// What autograd's own threads do, as they do for an accelerator, is not seen.
///
/// # Errors
/// When there is no memory for the list.
pub fn touched<T>(f: impl FnOnce() -> T) -> Result<(T, Touched), TorchError> {
    // SAFETY: on success it is a live list of this thread, which ends below or in `drop`.
    let mut under_way = UnderWay(unsafe { ffi::brimful_touches_begin() }?);
    let value = f();
    Ok((value, under_way.end()?))
}

/// Runs `f` as a part of work that is none of its doing: nothing of it is told.
pub fn untold<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: a list of this thread, or none, which comes back before it can end.
    let paused = unsafe { ffi::brimful_touches_exchange(ptr::null_mut()) };
    let _goes_on = AtEnd(|| {
        // SAFETY: as above.
        unsafe { ffi::brimful_touches_exchange(paused) };
    });
    f()
}

/// Whether one of these blocks is nobody else's any more: all tensors in it are gone.
pub fn any_is_left(blocks: &[Tensor]) -> bool {
    let blocks = raw_list(blocks);
    // SAFETY: the array has that many valid tensors.
    unsafe { ffi::brimful_any_is_left(blocks.as_ptr(), blocks.len()) }
}

/// A list that is being made; dropped by a panic, it ends all the same.
struct UnderWay(*mut RawTouches);

impl UnderWay {
    fn end(&mut self) -> Result<Touched, TorchError> {
        let list = std::mem::replace(&mut self.0, ptr::null_mut());
        let mut touched = Touched::default();
        let mut frozen = Frozen::default();
        let context = ptr::from_mut(&mut touched).cast();
        // SAFETY: the list is live and ends once, and the place for what is frozen is valid. `ran` and `found` are
        // called during this call alone, in which nobody else uses `touched`.
        let draws_on_host =
            unsafe { ffi::brimful_touches_end(list, ran, found, context, &raw mut frozen.0) }?;
        Ok(Touched { draws_on_host, frozen, ..touched })
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // What was touched is nobody's concern any more.
            let _ = self.end();
        }
    }
}

extern "C" fn ran(context: *mut c_void, line: *const c_char) {
    // SAFETY: it is the list of the call that is under way on this thread.
    let touched = unsafe { &mut *context.cast::<Touched>() };
    // SAFETY: the bridge hands out a text that ends in NUL and lives during the call.
    let line = unsafe { CStr::from_ptr(line) };
    touched.operations.push(line.to_string_lossy().into_owned());
}

extern "C" fn found(context: *mut c_void, bytes: *mut RawTensor, written: bool) {
    // SAFETY: it is the list of the call that is under way on this thread.
    let touched = unsafe { &mut *context.cast::<Touched>() };
    let list = if written { &mut touched.written } else { &mut touched.read };
    list.push(owned(bytes));
}
