//! A block of bytes in the host's memory that a device copies from and to by itself, made once and
//! used for many tensors.

use std::ffi::c_void;
use std::slice;

use tch::{Device, Tensor};

use crate::device::number;
use crate::error::TorchError;
use crate::host::prefer_large_pages;
use crate::touched::any_is_left;
use crate::{ffi, owned};

/// Pages are locked whole: a block begins and ends at a multiple of 4,096 bytes.
const PAGE: usize = 4096;

/// Bytes of the host, in pages that the system never moves, where a device's driver has locked them.
///
/// libtorch's own page-locked memory comes in powers of two; this is as large as it was asked for.
#[derive(Debug)]
pub struct Slab {
    bytes: Tensor,
    /// Where locked pages begin.
    locked: Option<*mut c_void>,
}

// SAFETY: the pointer is only ever given back to the driver, which any thread may do; the tensor is
// tch's, which is `Send`.
unsafe impl Send for Slab {}

impl Slab {
    /// So many bytes of ordinary memory, charged to the arena that this thread is in.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(bytes: usize) -> Result<Self, TorchError> {
        // Whole pages, so that a lock on the last one holds nothing of others.
        let room = bytes.next_multiple_of(PAGE);
        // SAFETY: takes plain numbers.
        let bytes = owned(unsafe { ffi::brimful_host_bytes(room, PAGE) }?);
        prefer_large_pages(&bytes);
        Ok(Self { bytes, locked: None })
    }

    /// Locks the pages, so that this device, a CUDA one, and all others copy them by themselves.
    ///
    /// # Errors
    /// When the system or the driver refuses; the memory serves as before then, at the speed of
    /// ordinary memory.
    pub fn lock(&mut self, device: Device) -> Result<(), TorchError> {
        if self.locked.is_some() || self.bytes.numel() == 0 {
            return Ok(());
        }
        let index = number(device)?;
        let start = self.bytes.data_ptr();
        let length = self.bytes.numel();
        // SAFETY: the pages are all within the tensor's memory, which is unlocked before it is freed.
        unsafe { ffi::brimful_lock_pages(start, length, index) }?;
        self.locked = Some(start);
        Ok(())
    }

    /// Whether its pages are locked.
    pub fn is_locked(&self) -> bool {
        self.locked.is_some()
    }

    /// The bytes, in whole pages: at least as many as were asked for.
    pub fn bytes(&self) -> &Tensor {
        &self.bytes
    }

    /// Whether nobody else looks at the bytes: no view of them is left.
    pub fn is_free(&self) -> bool {
        // A block that is nobody else's any more is left.
        any_is_left(slice::from_ref(&self.bytes))
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Some(start) = self.locked {
            // Fails only where the driver has ended, and with it every lock. Views that are left keep the
            // memory, which is ordinary from now on.
            // SAFETY: these pages were locked, and are unlocked once.
            let _ = unsafe { ffi::brimful_unlock_pages(start) };
        }
    }
}
