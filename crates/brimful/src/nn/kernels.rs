//! Custom CUDA kernels for the layers of this module: their state, and a switch.
//!
//! They run on CUDA in bf16, f16 and f32; those of BatchNorm need images in channels-last format. Elsewhere, and
//! if a kernel cannot be compiled, libtorch's own operations run, with equal results up to rounding.

use brimful_torch::TorchError;
use tch::Device;

use crate::Result;

pub use brimful_torch::kernels::{enabled, set_enabled};

/// Describes the kernels that run on this device: ours and how they were compiled, or libtorch's and why.
pub fn state(device: Device) -> String {
    brimful_torch::kernels::state(device).to_string()
}

/// Converts a layer's result. Logs, once for each cause, that libtorch's operations ran in place of our kernels.
pub(super) fn reported<T>(done: std::result::Result<T, TorchError>) -> Result<T> {
    for cause in brimful_torch::kernels::refusals() {
        tracing::warn!(cause, "libtorch's kernels run in the place of our own");
    }
    Ok(done?)
}
