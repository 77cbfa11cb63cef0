//! Copies between host and device that do not block the host.

use tch::{Device, Tensor};

use crate::device::number;
use crate::error::TorchError;
use crate::{cuda, ffi, owned, raw, raw_mut};

/// Returns a copy in pinned host memory, from which a device copies asynchronously. Without a CUDA device, or if
/// the tensor is not on the CPU, returns the tensor itself.
///
/// # Errors
/// When the system has no more memory to pin.
pub fn pin(tensor: &Tensor) -> Result<Tensor, TorchError> {
    if tensor.device() != Device::Cpu || cuda::device_count() == 0 {
        return Ok(tensor.shallow_clone());
    }
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_pin(raw(tensor)) }.map(owned)
}

/// Allocates uninitialised contiguous host memory of the tensor's shape and dtype. It is pinned if there is a
/// CUDA device, so that copies do not block the host.
///
/// # Errors
/// When the system has no more memory, or none to pin.
pub fn empty_pinned(tensor: &Tensor) -> Result<Tensor, TorchError> {
    empty(tensor, cuda::device_count() > 0, false)
}

/// Allocates host memory for a tensor that will be copied back. It is pinned only if the tensor is on a device.
/// The memory has the tensor's channels-last format, if it has one. So a copy to the host and back is contiguous,
/// and restores the format.
///
/// # Errors
/// As [`empty_pinned`].
pub fn empty_pinned_like(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let pinned = tensor.device() != Device::Cpu && cuda::device_count() > 0;
    empty(tensor, pinned, true)
}

fn empty(tensor: &Tensor, pinned: bool, keeps_order: bool) -> Result<Tensor, TorchError> {
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_empty_pinned(raw(tensor), pinned, keeps_order) }.map(owned)
}

/// Queues a copy of the data between a tensor on a device and another tensor, on this thread's stream of that device.
/// The host waits only if the other tensor is in pageable memory.
///
/// # Errors
/// When their shapes differ, or the device has failed.
pub fn copy(into: &Tensor, from: &Tensor) -> Result<(), TorchError> {
    // SAFETY: both tensors are valid.
    unsafe { ffi::brimful_copy(raw_mut(into), raw(from)) }
}

/// Queues a copy to the device on this thread's stream there. The host waits only if the source is not pinned, or
/// if the device is the CPU, because host code may read the copy at once.
///
/// # Errors
/// When memory runs out on the device, or the device does not exist.
pub fn send(tensor: &Tensor, device: Device) -> Result<Tensor, TorchError> {
    let index = number(device)?;
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_send(raw(tensor), index) }.map(owned)
}
