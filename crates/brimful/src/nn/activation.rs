//! Activations with a fused bias: GELU and SwiGLU.

use brimful_torch::activation::{Activation, bias_activation};
use tch::Tensor;

use crate::Result;
use crate::nn::kernels::reported;

/// Computes `gelu(x + bias)`, where the bias has one number for each column of the last dimension. One backward
/// pass computes the gradients of `x` and of the bias.
///
/// # Errors
///
/// When the bias does not fit.
pub fn bias_gelu(x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    reported(bias_activation(x, bias, Activation::GeluExact))
}

/// Computes [`bias_gelu`] with the GELU approximated by a hyperbolic tangent, as in GPT-2.
///
/// # Errors
/// As [`bias_gelu`].
pub fn bias_gelu_tanh(x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    reported(bias_activation(x, bias, Activation::GeluTanh))
}

/// Computes `silu(gate) · up`, where the last dimension of `x + bias` has the gate first and `up` second. So one
/// matrix product computes both gate and `up`.
///
/// # Errors
/// When the bias does not fit, or the last dimension is odd.
pub fn bias_swiglu(x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    reported(bias_activation(x, bias, Activation::SwiGlu))
}
