//! Device numbers of the bridge, and device synchronisation.

use tch::Device;

use crate::error::TorchError;
use crate::ffi;

/// Waits until all work queued on the device is done. A CPU has no queue.
///
/// # Errors
/// When the device has failed; faults of earlier kernels surface here.
pub fn synchronize(device: Device) -> Result<(), TorchError> {
    if device == Device::Cpu {
        return Ok(());
    }
    let index = number(device)?;
    // SAFETY: takes a plain number.
    unsafe { ffi::brimful_device_synchronize(index) }
}

/// Returns the bridge's number for a device: -1 is the CPU, 0 and up are CUDA devices.
pub(crate) fn number(device: Device) -> Result<i32, TorchError> {
    match device {
        Device::Cpu => Ok(-1),
        Device::Cuda(index) if index < tch::Cuda::device_count() as usize => Ok(index as i32),
        _ => Err(TorchError::other(format!("there is no device {device:?} here"))),
    }
}

/// Returns the bridge's number for a CUDA device; fails for a CPU.
pub(crate) fn accelerator(device: Device) -> Result<i32, TorchError> {
    match device {
        Device::Cpu => {
            Err(TorchError::other("libtorch keeps no memory statistics for a CPU: use an arena"))
        }
        _ => number(device),
    }
}
