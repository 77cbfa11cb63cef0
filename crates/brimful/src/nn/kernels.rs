//! Kernels of our own for the layers of this module: whether they are used, why not, and a switch.
//!
//! They run on CUDA where the numbers lie with the channels last, in bf16, f16 and f32. Elsewhere, and
//! where one cannot be had, libtorch's own operations run, with the same results up to rounding.

use brimful_torch::TorchError;

use crate::Result;

pub use brimful_torch::kernels::{State, enabled, set_enabled, state};

/// What a layer's work came to. Says, once each, why libtorch's operations ran where a kernel of ours could
/// have.
pub(super) fn told<T>(done: std::result::Result<T, TorchError>) -> Result<T> {
    for cause in brimful_torch::kernels::refusals() {
        tracing::warn!(cause, "libtorch's kernels run in the place of our own");
    }
    Ok(done?)
}
