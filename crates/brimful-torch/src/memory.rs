//! An accelerator's memory: what its caching allocator holds, and what the device has left.

use tch::Device;

use crate::device::accelerator;
use crate::error::{TorchError, call};
use crate::ffi::{self, RawMemory};

/// Figures of one device, in bytes unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In use by tensors now.
    pub current: u64,
    /// The most in use since the peak was reset.
    pub peak: u64,
    /// Held by the caching allocator, in use or not.
    pub reserved: u64,
    /// How often the allocator had to empty its cache to serve a request.
    pub allocation_retries: u64,
    /// How many requests were refused, even then.
    pub refusals: u64,
    /// Not held by anyone.
    pub free: u64,
    /// All of the device's.
    pub total: u64,
}

/// Reads the device's figures.
///
/// # Errors
/// When the device does not exist or is a CPU.
pub fn device_memory(device: Device) -> Result<DeviceMemory, TorchError> {
    let index = accelerator(device)?;
    let mut raw = RawMemory::default();
    // SAFETY: `raw` is a valid place for the figures.
    call(|message| unsafe { ffi::brimful_device_memory(index, &mut raw, message) })?;
    Ok(DeviceMemory {
        current: raw.current.unsigned_abs(),
        peak: raw.peak.unsigned_abs(),
        reserved: raw.reserved.unsigned_abs(),
        allocation_retries: raw.retries.unsigned_abs(),
        refusals: raw.refusals.unsigned_abs(),
        free: raw.free.unsigned_abs(),
        total: raw.total.unsigned_abs(),
    })
}

/// Lets the device's peak start again from what is in use now.
///
/// # Errors
/// When the device does not exist or is a CPU.
pub fn reset_peak(device: Device) -> Result<(), TorchError> {
    let index = accelerator(device)?;
    // SAFETY: takes plain numbers.
    call(|message| unsafe { ffi::brimful_reset_peak(index, message) })
}

/// Gives cached memory that no tensor uses back to the device.
///
/// # Errors
/// When the device does not exist or is a CPU.
pub fn empty_cache(device: Device) -> Result<(), TorchError> {
    let index = accelerator(device)?;
    // SAFETY: takes plain numbers.
    call(|message| unsafe { ffi::brimful_empty_cache(index, message) })
}
