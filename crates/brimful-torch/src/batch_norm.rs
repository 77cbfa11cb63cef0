//! BatchNorm fused with the following addition, ReLU or pooling. Runs in custom kernels where available, else in
//! libtorch's operations; the results agree up to rounding.

use std::ptr;

use tch::Tensor;

use crate::error::TorchError;
use crate::ffi::{self, RawNorm};
use crate::{cuda_object, owned, raw, raw_or_null};

/// BatchNorm and its input; channels are the second dimension.
#[derive(Debug, Clone, Copy)]
pub struct NormInput<'a> {
    /// Input.
    pub x: &'a Tensor,
    /// Weight per channel; ones if absent.
    pub weight: Option<&'a Tensor>,
    /// Bias per channel; zeros if absent.
    pub bias: Option<&'a Tensor>,
    /// Running mean and variance: used to normalise in evaluation, updated in training.
    pub running: Option<(&'a Tensor, &'a Tensor)>,
    /// True to normalise by the batch's own statistics.
    pub training: bool,
    /// Momentum of the running statistics.
    pub momentum: f64,
    /// Epsilon, added to the variance.
    pub eps: f64,
}

/// Addend of a BatchNorm's output, before the ReLU.
#[derive(Debug, Clone, Copy)]
pub enum Addend<'a> {
    /// Nothing.
    Nothing,
    /// A tensor of the same shape.
    Tensor(&'a Tensor),
    /// The output of another BatchNorm.
    Normed(NormInput<'a>),
}

/// Normalises, adds, and applies ReLU if asked.
///
/// # Errors
/// When libtorch refuses, or memory runs out.
pub fn batch_norm(
    norm: &NormInput<'_>,
    addend: Addend<'_>,
    relu: bool,
) -> Result<Tensor, TorchError> {
    cuda_object::load_for(norm.x);
    let (tensor, other) = match addend {
        Addend::Nothing => (None, None),
        Addend::Tensor(tensor) => (Some(tensor), None),
        Addend::Normed(other) => (None, Some(raw_norm(&other))),
    };
    let other = other.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: every pointer is null, or refers to a tensor or struct that outlives the call.
    unsafe { ffi::brimful_batch_norm(&raw_norm(norm), raw_or_null(tensor), other, relu) }.map(owned)
}

/// Normalises, then applies ReLU and a max pooling of 3×3, stride 2, padding 1.
///
/// # Errors
/// When libtorch refuses, or memory runs out.
pub fn batch_norm_relu_pool(norm: &NormInput<'_>) -> Result<Tensor, TorchError> {
    cuda_object::load_for(norm.x);
    // SAFETY: as above.
    unsafe { ffi::brimful_batch_norm_pool(&raw_norm(norm)) }.map(owned)
}

/// Returns the mean and the variance of each channel (second dimension) over all other dimensions.
///
/// # Errors
/// When libtorch refuses, or memory runs out.
pub fn moments(x: &Tensor) -> Result<[Tensor; 2], TorchError> {
    cuda_object::load_for(x);
    // SAFETY: the tensor is valid.
    Ok(unsafe { ffi::brimful_batch_norm_moments(raw(x)) }?.map(owned))
}

/// Returns a handle to the tensor's values for a second consumer. If the tensor is an output of [`batch_norm`],
/// the backward of that BatchNorm adds the gradients of both uses in its own pass. Otherwise, returns the tensor
/// itself.
///
/// # Errors
/// When memory runs out.
pub fn second_use(tensor: &Tensor) -> Result<Tensor, TorchError> {
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_second_use(raw(tensor)) }.map(owned)
}

fn raw_norm(norm: &NormInput<'_>) -> RawNorm {
    RawNorm {
        x: raw(norm.x),
        weight: raw_or_null(norm.weight),
        bias: raw_or_null(norm.bias),
        running_mean: raw_or_null(norm.running.map(|(mean, _)| mean)),
        running_variance: raw_or_null(norm.running.map(|(_, variance)| variance)),
        momentum: norm.momentum,
        eps: norm.eps,
        training: norm.training,
    }
}
