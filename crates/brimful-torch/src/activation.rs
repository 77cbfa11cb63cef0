//! A bias and an activation in one.

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

/// What is applied after the bias; numbered as in the bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Activation {
    /// GELU by the normal distribution.
    GeluExact = 0,
    /// GELU by a hyperbolic tangent.
    GeluTanh = 1,
    /// The first half of the columns through `SiLU`, times the second half.
    SwiGlu = 2,
}

/// Adds the bias, one number a column, and applies the activation.
///
/// # Errors
/// When the bias does not fit, a `SwiGLU` gets an odd number of columns, or memory runs out.
pub fn bias_activation(
    x: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
) -> Result<Tensor, TorchError> {
    cuda_object::load_for(x);
    // SAFETY: both tensors are valid, or null where that is allowed; the bridge checks that they fit.
    unsafe { ffi::brimful_activation(raw(x), raw_or_null(bias), activation as i32) }.map(owned)
}
