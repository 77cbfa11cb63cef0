//! Rotary position embedding.

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw};

/// Rotates the pairs of each head (one number of its first half, one of its second) by the angles of their
/// position. `x` is samples × sequence × heads × width, the tables are sequence × width/2.
///
/// # Errors
/// When the shapes or devices do not fit, or memory runs out.
pub fn rotary(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor, TorchError> {
    cuda_object::load_for(x);
    // SAFETY: all tensors are valid; the bridge checks that they fit.
    unsafe { ffi::brimful_rotary(raw(x), raw(cos), raw(sin)) }.map(owned)
}
