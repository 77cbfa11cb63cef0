//! Kernels of our own for the layers of this module: whether they run, the cause if not, and a switch.
//!
//! They run on CUDA for channels-last tensors in bf16, f16 and f32. Elsewhere, and if one cannot be compiled,
//! libtorch's own operations run, with equal results up to rounding.

use brimful_torch::TorchError;
use tch::Device;

use crate::Result;

pub use brimful_torch::kernels::{enabled, set_enabled};

/// Describes the kernels that run on this device: ours and how they were compiled, or libtorch's and why.
pub fn state(device: Device) -> String {
    brimful_torch::kernels::state(device).to_string()
}

/// Converts a layer's result. Logs once for each cause why libtorch's operations ran where a kernel of ours
/// could have.
pub(super) fn reported<T>(done: std::result::Result<T, TorchError>) -> Result<T> {
    for cause in brimful_torch::kernels::refusals() {
        tracing::warn!(cause, "libtorch's kernels run in the place of our own");
    }
    Ok(done?)
}
