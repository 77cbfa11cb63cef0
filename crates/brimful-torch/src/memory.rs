//! Memory statistics of an accelerator: its caching allocator, the allocator's limit, and free memory.

use tch::Device;

use crate::cuda_object;
use crate::device::accelerator;
use crate::error::TorchError;
use crate::ffi;

/// Memory statistics of one device, in bytes unless stated otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes in use by tensors now.
    pub current: u64,
    /// Most bytes in use since the peak was reset.
    pub peak: u64,
    /// Bytes held by the caching allocator, in use or not.
    pub reserved: u64,
    /// Number of times the allocator emptied its cache to serve a request.
    pub allocation_retries: u64,
    /// Number of requests refused even with an empty cache.
    pub refusals: u64,
    /// Bytes that no process holds, within the limit.
    pub free: u64,
    /// Total bytes of the device.
    pub total: u64,
    /// Most bytes that the caching allocator may hold: all, or the limit of [`set_limit`].
    pub limit: u64,
}

/// Reads the device's memory statistics.
///
/// # Errors
/// When the device does not exist or is a CPU.
pub fn device_memory(device: Device) -> Result<DeviceMemory, TorchError> {
    let index = accelerator(device)?;
    // SAFETY: takes a plain number.
    let figures = unsafe { ffi::brimful_device_memory(index) }?;
    // In the order of bridge/memory.cpp.
    let [current, peak, reserved, allocation_retries, refusals, free, total] =
        figures.map(i64::unsigned_abs);
    let limit = (share(index)? * total as f64).round() as u64;
    Ok(DeviceMemory {
        current,
        peak,
        reserved,
        allocation_retries,
        refusals,
        free: free.min(limit.saturating_sub(reserved)),
        total,
        limit,
    })
}

/// Returns the share of a device's memory that this process may take: 1 if the object that sets limits cannot be
/// loaded.
fn share(index: i32) -> Result<f64, TorchError> {
    if cuda_object::load().is_err() {
        return Ok(1.0);
    }
    // SAFETY: takes a plain number.
    let share = unsafe { ffi::brimful_memory_share(index) }?;
    Ok(share.clamp(0.0, 1.0))
}

/// Limits this process to this many bytes of the device: an allocation beyond that fails as on a full device.
/// `None`, or more than the device has, removes the limit.
///
/// # Errors
/// When the device does not exist or is a CPU, or its CUDA lacks a symbol.
pub fn set_limit(device: Device, bytes: Option<u64>) -> Result<(), TorchError> {
    let index = accelerator(device)?;
    cuda_object::load()?;
    let total = device_memory(device)?.total;
    // libtorch multiplies and truncates; half a byte more compensates for that.
    let share = bytes.map_or(1.0, |bytes| ((bytes as f64 + 0.5) / total as f64).min(1.0));
    // SAFETY: takes plain numbers.
    unsafe { ffi::brimful_set_memory_share(index, share) }
}

/// Resets the device's peak to the bytes in use now.
///
/// # Errors
/// When the device does not exist or is a CPU.
pub fn reset_peak(device: Device) -> Result<(), TorchError> {
    let index = accelerator(device)?;
    // SAFETY: takes a plain number.
    unsafe { ffi::brimful_reset_peak(index) }
}

/// Returns unused cached memory to the device.
///
/// # Errors
/// When the device does not exist or is a CPU.
pub fn empty_cache(device: Device) -> Result<(), TorchError> {
    let index = accelerator(device)?;
    // SAFETY: takes a plain number.
    unsafe { ffi::brimful_empty_cache(index) }
}
