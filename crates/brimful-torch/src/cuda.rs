//! libtorch's CUDA half, loaded at run time where it is present: one binary for both machines.
//!
//! On a machine with an NVIDIA driver it is loaded before `main`, because libtorch asks for it once
//! and for all at the first call that cares. Here one asks how that went.

use std::sync::OnceLock;

use crate::error::{TorchError, call, take_string};
use crate::ffi;

/// Whether the CUDA kernels are loaded; tries again where they were not. Later calls repeat the
/// first one's answer.
///
/// # Errors
/// With the loader's own words, when `libtorch_cuda.so` or one of its needs is not found.
pub fn load() -> Result<(), TorchError> {
    static LOADED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    // SAFETY: takes nothing but the place for its message.
    LOADED.get_or_init(|| call(|message| unsafe { ffi::brimful_load_cuda(message) })).clone()
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
    let mut version = 0;
    // SAFETY: `version` is a valid place for the answer.
    call(|message| unsafe { ffi::brimful_cuda_driver(&mut version, message) })?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// What the maker calls the device, such as `NVIDIA H200`.
///
/// # Errors
/// When there is no such device.
pub fn device_name(index: usize) -> Result<String, TorchError> {
    let number = crate::device::number(tch::Device::Cuda(index))?;
    let mut name = std::ptr::null_mut();
    // SAFETY: on success `name` is a string that is ours.
    call(|message| unsafe { ffi::brimful_cuda_name(number, &mut name, message) })?;
    Ok(take_string(name).unwrap_or_default())
}

/// Lets CUDA compute products and convolutions of f32 in TF32, which keeps 10 bits of a fraction's 23
/// and is several times faster; for the process. libtorch starts with convolutions allowed alone.
///
/// # Errors
/// When libtorch refuses, as it does where its newer precision settings were used.
pub fn allow_tf32(allowed: bool) -> Result<(), TorchError> {
    // SAFETY: takes plain values.
    call(|message| unsafe { ffi::brimful_allow_tf32(allowed, message) })
}

/// Whether CUDA may compute convolutions of f32 in TF32.
///
/// # Errors
/// As [`allow_tf32`].
pub fn allows_tf32() -> Result<bool, TorchError> {
    let mut allowed = false;
    // SAFETY: `allowed` is a valid place for the answer.
    call(|message| unsafe { ffi::brimful_allows_tf32(&mut allowed, message) })?;
    Ok(allowed)
}
