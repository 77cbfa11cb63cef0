//! Bias and activation, fused.

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

/// Activation applied after the bias; numbered as in the bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Activation {
    /// Exact GELU (normal distribution function).
    GeluExact = 0,
    /// GELU, tanh approximation.
    GeluTanh = 1,
    /// `SiLU` of the first half of the columns, times the second half.
    SwiGlu = 2,
}

/// Adds a bias per column and applies the activation.
///
/// # Errors
/// When the bias does not fit, a `SwiGLU` gets an odd number of columns, or memory runs out.
pub fn bias_activation(
    x: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
) -> Result<Tensor, TorchError> {
    cuda_object::load_for(x);
    // SAFETY: `x` and `bias` are valid during the call; a missing bias is null. The bridge checks that their
    // shapes fit.
    unsafe { ffi::brimful_activation(raw(x), raw_or_null(bias), activation as i32) }.map(owned)
}
