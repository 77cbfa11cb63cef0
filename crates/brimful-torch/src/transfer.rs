//! Copies between host and device that do not make the host wait.

use tch::{Device, Tensor};

use crate::device::number;
use crate::error::TorchError;
use crate::{cuda, ffi, owned, raw, raw_mut};

/// A copy in page-locked host memory, from which a device copies without making the host wait.
/// Where there is no CUDA device, or the tensor is not on the CPU, it is the tensor itself.
///
/// # Errors
/// When the system has no more memory to lock.
pub fn pin(tensor: &Tensor) -> Result<Tensor, TorchError> {
    if tensor.device() != Device::Cpu || cuda::device_count() == 0 {
        return Ok(tensor.shallow_clone());
    }
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_pin(raw(tensor)) }.map(owned)
}

/// Host memory of the tensor's shape and kind, yet to be filled, in the order of its dimensions:
/// page-locked where there is a CUDA device, so that it copies from there and back without making the
/// host wait.
///
/// # Errors
/// When the system has no more memory, or none to lock.
pub fn room_for(tensor: &Tensor) -> Result<Tensor, TorchError> {
    room(tensor, cuda::device_count() > 0, false)
}

/// The same for a tensor that is to come back, page-locked only where that is on a device; with the channels
/// last where its are: a copy there and back is one in one piece, and gives the order back too.
///
/// # Errors
/// As [`room_for`].
pub fn room_like(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let page_locked = tensor.device() != Device::Cpu && cuda::device_count() > 0;
    room(tensor, page_locked, true)
}

fn room(tensor: &Tensor, page_locked: bool, keeps_order: bool) -> Result<Tensor, TorchError> {
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_room_for(raw(tensor), page_locked, keeps_order) }.map(owned)
}

/// Queues a copy of the numbers into another tensor on this thread's stream of the device that one
/// of them is on. The host waits only where the other is in memory that is not page-locked.
///
/// # Errors
/// When their shapes differ, or the device has failed.
pub fn copy(into: &Tensor, from: &Tensor) -> Result<(), TorchError> {
    // SAFETY: both tensors are valid.
    unsafe { ffi::brimful_copy(raw_mut(into), raw(from)) }
}

/// Queues a copy to the device on this thread's stream there. The host waits only where the source
/// is not page-locked, or the device is the CPU, whose tensors are used at once.
///
/// # Errors
/// When memory runs out on the device, or it does not exist.
pub fn send(tensor: &Tensor, device: Device) -> Result<Tensor, TorchError> {
    let index = number(device)?;
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_send(raw(tensor), index) }.map(owned)
}
