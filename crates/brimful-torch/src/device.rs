//! Devices as the bridge numbers them, and waiting for one.

use tch::Device;

use crate::error::TorchError;
use crate::ffi;

/// Waits until everything queued on the device is done. On a CPU nothing ever is queued.
///
/// # Errors
/// When the device has failed, which is where an earlier kernel's fault shows.
pub fn synchronize(device: Device) -> Result<(), TorchError> {
    if device == Device::Cpu {
        return Ok(());
    }
    let index = number(device)?;
    // SAFETY: takes a plain number.
    unsafe { ffi::brimful_device_synchronize(index) }
}

/// The bridge's number for a device: -1 is the CPU, 0 and up are CUDA's.
pub(crate) fn number(device: Device) -> Result<i32, TorchError> {
    match device {
        Device::Cpu => Ok(-1),
        Device::Cuda(index) if index < tch::Cuda::device_count() as usize => Ok(index as i32),
        _ => Err(TorchError::other(format!("there is no device {device:?} here"))),
    }
}

/// As [`number`], for calls that make no sense on a CPU.
pub(crate) fn accelerator(device: Device) -> Result<i32, TorchError> {
    match device {
        Device::Cpu => Err(TorchError::other("a CPU keeps no such figures: use an arena")),
        _ => number(device),
    }
}
