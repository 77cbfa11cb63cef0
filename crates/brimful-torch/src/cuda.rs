//! libtorch's CUDA half, loaded at run time where it is present: one binary for both machines.
//!
//! On a machine with an NVIDIA driver it is loaded before `main`, because libtorch asks for it once
//! and for all at the first call that cares. Here one asks how that went.

use std::sync::OnceLock;

use crate::error::{TorchError, take_string};
use crate::ffi;

/// Whether the CUDA kernels are loaded; tries again where they were not. Later calls repeat the
/// first one's answer.
///
/// # Errors
/// With the loader's own words, when `libtorch_cuda.so` or one of its needs is not found.
pub fn load() -> Result<(), TorchError> {
    static LOADED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    // SAFETY: takes nothing.
    LOADED.get_or_init(|| unsafe { ffi::brimful_load_cuda() }).clone()
}

/// How many CUDA devices can be used; loads CUDA first.
pub fn device_count() -> usize {
    match load() {
        Ok(()) => usize::try_from(tch::Cuda::device_count()).unwrap_or(0),
        Err(_) => 0,
    }
}

/// The newest CUDA version that the machine's driver can serve, such as `13.0`.
///
/// # Errors
/// When the machine has no NVIDIA driver.
pub fn driver_version() -> Result<String, TorchError> {
    // SAFETY: takes nothing.
    let version = unsafe { ffi::brimful_cuda_driver() }?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// What the maker calls the device, such as `NVIDIA H200`.
///
/// # Errors
/// When there is no such device.
pub fn device_name(index: usize) -> Result<String, TorchError> {
    let number = crate::device::number(tch::Device::Cuda(index))?;
    // SAFETY: takes a plain number.
    let name = unsafe { ffi::brimful_cuda_name(number) }?;
    Ok(take_string(name).unwrap_or_default())
}

/// Lets CUDA compute products and convolutions of f32 in TF32, which keeps 10 bits of a fraction's 23
/// and is several times faster; for the process. libtorch starts with convolutions allowed alone.
///
/// # Errors
/// When libtorch refuses, as it does where its newer precision settings were used.
pub fn allow_tf32(allowed: bool) -> Result<(), TorchError> {
    // SAFETY: takes a plain value.
    unsafe { ffi::brimful_allow_tf32(allowed) }
}

/// Whether CUDA may compute convolutions of f32 in TF32.
///
/// # Errors
/// As [`allow_tf32`].
pub fn allows_tf32() -> Result<bool, TorchError> {
    // SAFETY: takes nothing.
    unsafe { ffi::brimful_allows_tf32() }
}
