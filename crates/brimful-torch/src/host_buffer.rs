//! Host buffer that can be pinned, allocated once and reused for many tensors.

use std::ffi::c_void;
use std::slice;

use tch::{Device, Tensor};

use crate::device::number;
use crate::error::TorchError;
use crate::host::prefer_large_pages;
use crate::touched::any_is_left;
use crate::{ffi, owned};

/// Page size: memory is pinned in whole pages of 4,096 bytes, so a buffer begins and ends at a multiple of it.
const PAGE: usize = 4096;

/// Host buffer of whole pages, which a device's driver can pin.
///
/// libtorch's own pinned memory comes in powers of two; this buffer is as large as requested.
#[derive(Debug)]
pub struct HostBuffer {
    bytes: Tensor,
    /// Start of the pinned pages, if pinned.
    pinned: Option<*mut c_void>,
}

// SAFETY: the pointer is only ever passed back to the driver, which any thread may do; tch's tensor is `Send`.
unsafe impl Send for HostBuffer {}

impl HostBuffer {
    /// Allocates this many bytes of pageable memory, charged to the thread's current arena.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(bytes: usize) -> Result<Self, TorchError> {
        // Whole pages, so that pinning the last one affects no other memory.
        let whole_pages = bytes.next_multiple_of(PAGE);
        // SAFETY: takes plain numbers.
        let bytes = owned(unsafe { ffi::brimful_host_bytes(whole_pages, PAGE) }?);
        prefer_large_pages(&bytes);
        Ok(Self { bytes, pinned: None })
    }

    /// Pins the pages, so that CUDA devices copy to and from them asynchronously.
    ///
    /// # Errors
    /// When the system or the driver refuses; the buffer then stays pageable, with slower copies.
    pub fn pin(&mut self, device: Device) -> Result<(), TorchError> {
        if self.pinned.is_some() || self.bytes.numel() == 0 {
            return Ok(());
        }
        let index = number(device)?;
        let start = self.bytes.data_ptr();
        let length = self.bytes.numel();
        // SAFETY: the pages are all within the tensor's memory, which is unpinned before it is freed.
        unsafe { ffi::brimful_pin_pages(start, length, index) }?;
        self.pinned = Some(start);
        Ok(())
    }

    /// Returns whether the pages are pinned.
    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// Returns the bytes, in whole pages: at least as many as requested.
    pub fn bytes(&self) -> &Tensor {
        &self.bytes
    }

    /// Returns whether no view of the bytes is left.
    pub fn is_free(&self) -> bool {
        // `any_is_left` returns true for a block without other users.
        any_is_left(slice::from_ref(&self.bytes))
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Some(start) = self.pinned {
            // Fails only if the driver has shut down, which releases every pin. Views that are left keep the
            // memory, which is pageable from now on.
            // SAFETY: these pages were pinned, and are unpinned once.
            let _ = unsafe { ffi::brimful_unpin_pages(start) };
        }
    }
}
