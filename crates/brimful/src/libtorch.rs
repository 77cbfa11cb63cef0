//! The running libtorch: its version, its path, and its CUDA libraries.

pub use brimful_torch::libtorch::{EXPECTED_VERSION, cpu_capability, library_path, version};
pub use brimful_torch::threads::threads;

use crate::Result;

/// Loads libtorch's CUDA libraries, if they are present. Every use of a CUDA device loads them too.
///
/// # Errors
///
/// With the loader's message, if a library or one of its dependencies is missing.
pub fn load_cuda() -> Result<()> {
    Ok(brimful_torch::cuda::load()?)
}

/// Returns the newest CUDA version that the machine's driver supports, such as `13.0`.
///
/// # Errors
/// When the machine has no NVIDIA driver.
pub fn cuda_driver() -> Result<String> {
    Ok(brimful_torch::cuda::driver_version()?)
}
