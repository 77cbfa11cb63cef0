//! An accelerator's memory: what its caching allocator holds and may hold, and what the device has left.

use tch::Device;

use crate::cuda_object;
use crate::device::accelerator;
use crate::error::TorchError;
use crate::ffi;

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
    /// Not held by anyone, and within the limit.
    pub free: u64,
    /// All of the device's.
    pub total: u64,
    /// The most that the caching allocator may hold: all of it, or what [`set_limit`] left to it.
    pub limit: u64,
}

/// Reads the device's figures.
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

/// The share of a device's memory that this process may take: all, where the object that could have
/// set a limit cannot be loaded.
fn share(index: i32) -> Result<f64, TorchError> {
    if cuda_object::load().is_err() {
        return Ok(1.0);
    }
    // SAFETY: takes a plain number.
    let share = unsafe { ffi::brimful_memory_share(index) }?;
    Ok(share.clamp(0.0, 1.0))
}

/// Lets this process take no more than so many bytes of the device: past that an allocation fails as
/// on a full device. `None` lifts the limit, and so does more than the device has.
///
/// # Errors
/// When the device does not exist or is a CPU, or its CUDA lacks what is needed.
pub fn set_limit(device: Device, bytes: Option<u64>) -> Result<(), TorchError> {
    let index = accelerator(device)?;
    cuda_object::load()?;
    let total = device_memory(device)?.total;
    // libtorch multiplies, and cuts off what is behind the point: half a byte more is enough.
    let share = bytes.map_or(1.0, |bytes| ((bytes as f64 + 0.5) / total as f64).min(1.0));
    // SAFETY: takes plain numbers.
    unsafe { ffi::brimful_set_memory_share(index, share) }
}

/// Lets the device's peak start again from what is in use now.
///
/// # Errors
/// When the device does not exist or is a CPU.
pub fn reset_peak(device: Device) -> Result<(), TorchError> {
    let index = accelerator(device)?;
    // SAFETY: takes a plain number.
    unsafe { ffi::brimful_reset_peak(index) }
}

/// Gives cached memory that no tensor uses back to the device.
///
/// # Errors
/// When the device does not exist or is a CPU.
pub fn empty_cache(device: Device) -> Result<(), TorchError> {
    let index = accelerator(device)?;
    // SAFETY: takes a plain number.
    unsafe { ffi::brimful_empty_cache(index) }
}
