//! Copies between host and device that do not make the host wait.

use std::ptr;
use tch::{Device, Tensor};

use crate::device::number;
use crate::error::{TorchError, call};
use crate::{cuda, ffi, owned, raw};

/// A copy in page-locked host memory, from which a device copies without making the host wait.
/// Where there is no CUDA device, or the tensor is not on the CPU, it is the tensor itself.
///
/// # Errors
/// When the system has no more memory to lock.
pub fn pin(tensor: &Tensor) -> Result<Tensor, TorchError> {
    if tensor.device() != Device::Cpu || cuda::device_count() == 0 {
        return Ok(tensor.shallow_clone());
    }
    let mut pinned = ptr::null_mut();
    // SAFETY: on success `pinned` is a new tensor that is ours.
    call(|message| unsafe { ffi::brimful_pin(raw(tensor), &mut pinned, message) })?;
    Ok(owned(pinned))
}

/// Queues a copy to the device on this thread's stream there. The host waits only where the source
/// is not page-locked.
///
/// # Errors
/// When memory runs out on the device, or it does not exist.
pub fn send(tensor: &Tensor, device: Device) -> Result<Tensor, TorchError> {
    let index = number(device)?;
    let mut sent = ptr::null_mut();
    // SAFETY: on success `sent` is a new tensor that is ours.
    call(|message| unsafe { ffi::brimful_send(raw(tensor), index, &mut sent, message) })?;
    Ok(owned(sent))
}
