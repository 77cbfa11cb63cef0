//! Activations that add a bias on the way: GELU and SwiGLU.

use brimful_torch::activation::{Activation, bias_activation};
use tch::Tensor;

use crate::Result;
use crate::nn::kernels::told;

/// How a GELU is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gelu {
    /// By the normal distribution.
    #[default]
    Exact,
    /// By a hyperbolic tangent, as GPT-2 has it.
    Tanh,
}

/// `gelu(x + bias)`, with one number of the bias for each of the last dimension's columns. The bias's
/// gradient comes out of the same pass as that of `x`.
///
/// # Errors
/// When the bias does not fit.
pub fn bias_gelu(x: &Tensor, bias: Option<&Tensor>, how: Gelu) -> Result<Tensor> {
    let activation = match how {
        Gelu::Exact => Activation::GeluExact,
        Gelu::Tanh => Activation::GeluTanh,
    };
    told(bias_activation(x, bias, activation))
}

/// `silu(gate) · up`, where both are halves of the last dimension of `x + bias`: the gate first. One
/// product makes both of them.
///
/// # Errors
/// When the bias does not fit, or the last dimension is odd.
pub fn bias_swiglu(x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    told(bias_activation(x, bias, Activation::SwiGlu))
}
