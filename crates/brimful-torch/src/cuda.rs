//! CUDA libraries of libtorch, loaded at run time where present, so that one binary serves machines with and
//! without a GPU.
//!
//! On a machine with an NVIDIA driver they are loaded before `main`, because libtorch checks for CUDA once, at
//! the first call that depends on it. This module reports the outcome.

use std::sync::OnceLock;

use crate::error::{TorchError, take_string};
use crate::ffi;

/// Loads libtorch's CUDA libraries if they are not loaded yet. Later calls return the result of the first call.
///
/// # Errors
/// The loader's message, when `libtorch_cuda.so` or one of its dependencies is not found.
pub fn load() -> Result<(), TorchError> {
    static LOADED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    // SAFETY: takes nothing.
    LOADED.get_or_init(|| unsafe { ffi::brimful_load_cuda() }).clone()
}

/// Returns the number of usable CUDA devices; loads CUDA first.
pub fn device_count() -> usize {
    match load() {
        Ok(()) => usize::try_from(tch::Cuda::device_count()).unwrap_or(0),
        Err(_) => 0,
    }
}

/// Returns the newest CUDA version that the machine's driver supports, such as `13.0`.
///
/// # Errors
/// When the machine has no NVIDIA driver.
pub fn driver_version() -> Result<String, TorchError> {
    // SAFETY: takes nothing.
    let version = unsafe { ffi::brimful_cuda_driver() }?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// Returns the device's product name, such as `NVIDIA H200`.
///
/// # Errors
/// When there is no such device.
pub fn device_name(index: usize) -> Result<String, TorchError> {
    let number = crate::device::number(tch::Device::Cuda(index))?;
    // SAFETY: takes a plain number.
    let name = unsafe { ffi::brimful_cuda_name(number) }?;
    Ok(take_string(name).unwrap_or_default())
}

/// Allows CUDA to compute f32 products and convolutions in TF32, for the whole process. TF32 keeps 10 of 23
/// mantissa bits and is several times faster. By default libtorch allows TF32 for convolutions only.
///
/// # Errors
/// When libtorch refuses, as it does once its newer precision settings were used.
pub fn allow_tf32(allowed: bool) -> Result<(), TorchError> {
    // SAFETY: takes a plain value.
    unsafe { ffi::brimful_allow_tf32(allowed) }
}

/// Returns whether CUDA may compute f32 convolutions in TF32.
///
/// # Errors
/// As [`allow_tf32`].
pub fn allows_tf32() -> Result<bool, TorchError> {
    // SAFETY: takes nothing.
    unsafe { ffi::brimful_allows_tf32() }
}
