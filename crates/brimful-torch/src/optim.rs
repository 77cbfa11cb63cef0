//! Fused optimizers of libtorch: update many parameters in one pass over their memory.
//!
//! All parameters of a call share their dtype and device. Gradients and state must match their parameter element
//! by element in memory: see [`fits`]. A call allocates nothing, so it cannot run out of memory.

use std::ptr;
use tch::Tensor;

use crate::error::TorchError;
use crate::ffi::{self, RawAdam, RawSgd};
use crate::{raw, raw_list};

/// Learning rate of a step.
#[derive(Debug, Clone, Copy)]
pub enum LearningRate<'a> {
    /// A number.
    Number(f64),
    /// A 0-dim f32 tensor on the parameters' device that the kernel reads: a captured CUDA graph follows its
    /// changes.
    Tensor(&'a Tensor),
}

impl LearningRate<'_> {
    fn split(&self) -> (f64, *const ffi::RawTensor) {
        match self {
            Self::Number(rate) => (*rate, ptr::null()),
            Self::Tensor(rate) => (0.0, raw(rate)),
        }
    }
}

/// Settings of SGD.
#[derive(Debug, Clone, Copy)]
pub struct SgdOptions {
    /// Momentum.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
    /// True in the first step: the buffers are empty and the gradient initialises them.
    pub first: bool,
}

/// Settings of Adam and `AdamW`.
#[derive(Debug, Clone, Copy)]
pub struct AdamOptions {
    /// Decay rates of the averages of gradients and of squared gradients.
    pub betas: (f64, f64),
    /// Epsilon, keeps the divisor from zero.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// True for `AdamW`: weight decay does not go through the gradient.
    pub decoupled: bool,
}

impl AdamOptions {
    fn raw(&self, learning_rate: f64, amsgrad: bool) -> RawAdam {
        let &Self { betas: (beta1, beta2), eps, weight_decay, decoupled } = self;
        RawAdam { learning_rate, beta1, beta2, eps, weight_decay, amsgrad, decoupled }
    }
}

/// State of Adam for each parameter, as parallel lists.
#[derive(Debug, Clone, Copy)]
pub struct AdamState<'a> {
    /// Averages of the gradients.
    pub averages: &'a [Tensor],
    /// Averages of their squares.
    pub squares: &'a [Tensor],
    /// Largest averages of squares so far, for amsgrad; `None` for plain Adam.
    pub maxima: Option<&'a [Tensor]>,
    /// Step counts, one f32 tensor each, incremented by the call.
    pub steps: &'a [Tensor],
}

/// Returns whether `other` matches the parameter's memory element by element, and the parameter has no gaps.
/// `fits(p, p)` tests whether a fused kernel can update `p` in place.
pub fn fits(parameter: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both are valid; the call only reads.
    unsafe { ffi::brimful_fits(raw(parameter), raw(other)) }
}

/// Runs one step of SGD; without buffers, without momentum.
///
/// # Errors
/// When lists differ in length or tensors differ in memory format; nothing is changed then.
pub fn sgd(
    parameters: &[Tensor],
    gradients: &[Tensor],
    buffers: Option<&[Tensor]>,
    rate: LearningRate<'_>,
    options: &SgdOptions,
) -> Result<(), TorchError> {
    let count = parameters.len();
    same_length(count, [Some(gradients), buffers])?;
    let (learning_rate, rate) = rate.split();
    let &SgdOptions { momentum, dampening, weight_decay, nesterov, first } = options;
    let options = RawSgd { learning_rate, momentum, dampening, weight_decay, nesterov, first };
    let (parameters, gradients) = (raw_list(parameters), raw_list(gradients));
    let buffers = buffers.map(raw_list);
    // SAFETY: every array has `count` valid tensors or is null where that is allowed; the bridge checks that
    // their memory formats match before a kernel reads them.
    unsafe {
        let (parameters, gradients) = (parameters.as_ptr(), gradients.as_ptr());
        let buffers = buffers.as_ref().map_or(ptr::null(), Vec::as_ptr);
        ffi::brimful_fused_sgd(parameters, gradients, buffers, count, &options, rate)
    }
}

/// Runs one step of Adam or `AdamW`.
///
/// # Errors
/// When lists differ in length or tensors differ in memory format; nothing is changed then.
pub fn adam(
    parameters: &[Tensor],
    gradients: &[Tensor],
    state: AdamState<'_>,
    rate: LearningRate<'_>,
    options: &AdamOptions,
) -> Result<(), TorchError> {
    let count = parameters.len();
    let AdamState { averages, squares, maxima, steps } = state;
    same_length(count, [Some(gradients), Some(averages), Some(squares), maxima, Some(steps)])?;
    let (learning_rate, rate) = rate.split();
    let options = options.raw(learning_rate, maxima.is_some());
    let (parameters, gradients) = (raw_list(parameters), raw_list(gradients));
    let (averages, squares) = (raw_list(averages), raw_list(squares));
    let (maxima, steps) = (maxima.map(raw_list), raw_list(steps));
    // SAFETY: as in `sgd`.
    unsafe {
        ffi::brimful_fused_adam(
            parameters.as_ptr(),
            gradients.as_ptr(),
            averages.as_ptr(),
            squares.as_ptr(),
            maxima.as_ref().map_or(ptr::null(), Vec::as_ptr),
            steps.as_ptr(),
            count,
            &options,
            rate,
        )
    }
}

/// Parameter and Adam state, before or after a step.
#[derive(Debug, Clone, Copy)]
pub struct AdamNumbers<'a> {
    /// The parameter.
    pub parameter: &'a Tensor,
    /// Average of its gradients.
    pub average: &'a Tensor,
    /// Average of its squared gradients.
    pub square: &'a Tensor,
}

impl AdamNumbers<'_> {
    fn raw(&self) -> [*const ffi::RawTensor; 3] {
        [self.parameter, self.average, self.square].map(raw)
    }
}

/// Computes an [`adam`] step of one parameter out of place, into `next`: the same numbers to the last bit, in one
/// pass over the memory. The step counts from 1. Returns whether that is possible: for f32 on a CPU whose
/// libtorch rounds the same way.
///
/// # Errors
/// When tensors differ in memory format; nothing is changed then.
pub fn adam_beside(
    now: AdamNumbers<'_>,
    gradient: &Tensor,
    next: AdamNumbers<'_>,
    step: f64,
    learning_rate: f64,
    options: &AdamOptions,
) -> Result<bool, TorchError> {
    let options = options.raw(learning_rate, false);
    let (now, next) = (now.raw(), next.raw());
    // SAFETY: both arrays have three valid tensors; the bridge checks that all memory formats match.
    unsafe { ffi::brimful_adam_beside(now.as_ptr(), raw(gradient), next.as_ptr(), &options, step) }
}

fn same_length<const N: usize>(
    count: usize,
    lists: [Option<&[Tensor]>; N],
) -> Result<(), TorchError> {
    match lists.into_iter().flatten().find(|list| list.len() != count) {
        None => Ok(()),
        Some(list) => Err(TorchError::other(format!(
            "an optimizer's lists must match its {count} parameters, but one has {}",
            list.len()
        ))),
    }
}
