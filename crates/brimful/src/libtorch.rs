//! The libtorch that is running: which one, where from, and whether CUDA came with it.

pub use brimful_torch::libtorch::{EXPECTED_VERSION, cpu_capability, library_path, version};
pub use brimful_torch::threads::threads;

use crate::Result;

/// Loads libtorch's CUDA half, where it is present. Whatever names a CUDA device does so itself.
///
/// # Errors
/// With the loader's own words, when it or one of its needs is not found.
pub fn load_cuda() -> Result<()> {
    Ok(brimful_torch::cuda::load()?)
}

/// The newest CUDA version that the machine's driver serves, such as `13.0`.
///
/// # Errors
/// When the machine has no NVIDIA driver.
pub fn cuda_driver() -> Result<String> {
    Ok(brimful_torch::cuda::driver_version()?)
}

/// Lets CUDA compute products and convolutions of f32 in TF32: several times faster, with 10 bits of
/// a fraction's 23. For the whole process; libtorch starts with convolutions allowed alone.
///
/// # Errors
/// When libtorch refuses, as it does where its newer precision settings were used.
pub fn allow_tf32(allowed: bool) -> Result<()> {
    Ok(brimful_torch::cuda::allow_tf32(allowed)?)
}

/// Whether CUDA may compute convolutions of f32 in TF32.
///
/// # Errors
/// As [`allow_tf32`].
pub fn allows_tf32() -> Result<bool> {
    Ok(brimful_torch::cuda::allows_tf32()?)
}
