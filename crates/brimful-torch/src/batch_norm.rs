//! BatchNorm with what follows it: an addition, ReLU, a pooling. In kernels of our own where they can be
//! had, else by libtorch's operations; the numbers are the same up to rounding.

use std::ptr;

use tch::Tensor;

use crate::error::TorchError;
use crate::ffi::{self, RawNorm};
use crate::{cuda_object, owned, raw, raw_or_null};

/// A BatchNorm and its input, with the channels second.
#[derive(Debug, Clone, Copy)]
pub struct NormInput<'a> {
    /// What is normalised.
    pub x: &'a Tensor,
    /// Ones without it.
    pub weight: Option<&'a Tensor>,
    /// Zeros without it.
    pub bias: Option<&'a Tensor>,
    /// The running mean and variance: what normalises in evaluation, and is moved in training.
    pub running: Option<(&'a Tensor, &'a Tensor)>,
    /// Whether the batch's own statistics normalise.
    pub training: bool,
    /// How far the running statistics move.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
}

/// What is added to a BatchNorm's output, before the ReLU.
#[derive(Debug, Clone, Copy)]
pub enum Addend<'a> {
    /// Nothing.
    Nothing,
    /// A tensor of the same shape.
    Tensor(&'a Tensor),
    /// The output of another BatchNorm.
    Normed(NormInput<'a>),
}

/// Normalises, adds, and lets ReLU have it if asked to.
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
    // SAFETY: all tensors are valid or null.
    unsafe { ffi::brimful_batch_norm(&raw_norm(norm), raw_or_null(tensor), other, relu) }.map(owned)
}

/// Normalises, then ReLU and a pooling of 3×3, stride 2 and padding 1.
///
/// # Errors
/// When libtorch refuses, or memory runs out.
pub fn batch_norm_relu_pool(norm: &NormInput<'_>) -> Result<Tensor, TorchError> {
    cuda_object::load_for(norm.x);
    // SAFETY: as above.
    unsafe { ffi::brimful_batch_norm_pool(&raw_norm(norm)) }.map(owned)
}

/// The mean and the variance of each channel, which is the second dimension, over all else.
///
/// # Errors
/// When libtorch refuses, or memory runs out.
pub fn moments(x: &Tensor) -> Result<[Tensor; 2], TorchError> {
    cuda_object::load_for(x);
    // SAFETY: the tensor is valid.
    Ok(unsafe { ffi::brimful_batch_norm_moments(raw(x)) }?.map(owned))
}

/// The same numbers for a second use of them. Where they are what [`batch_norm`] has given, the
/// gradients of both uses are added in its backward's own pass; elsewhere it is the tensor itself.
///
/// # Errors
/// When there is no memory for it.
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
