//! libtorch's fused optimizers: the update of many parameters in one pass over their memory.
//!
//! All parameters of a call share their kind and device, and everything that belongs to a parameter
//! is laid out as it is: see [`fits`]. A call allocates nothing, so memory cannot run out in it.

use std::ptr;
use tch::Tensor;

use crate::error::TorchError;
use crate::ffi::{self, RawAdam, RawSgd};
use crate::{raw, raw_list};

/// How far a step goes.
#[derive(Debug, Clone, Copy)]
pub enum LearningRate<'a> {
    /// A number.
    Number(f64),
    /// A 0-dim f32 tensor on the parameters' device, read by the kernel itself: one captured into
    /// a CUDA graph follows its changes.
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

/// What stochastic gradient descent is told.
#[derive(Debug, Clone, Copy)]
pub struct SgdOptions {
    /// How much of the last direction is kept.
    pub momentum: f64,
    /// How much of the gradient is left out of the direction.
    pub dampening: f64,
    /// How much of the parameter is added to its gradient.
    pub weight_decay: f64,
    /// Looks ahead along the direction.
    pub nesterov: bool,
    /// The buffers hold nothing yet: the gradient becomes the direction.
    pub first: bool,
}

/// What Adam and `AdamW` are told.
#[derive(Debug, Clone, Copy)]
pub struct AdamOptions {
    /// The decays of the averages of gradients and of their squares.
    pub betas: (f64, f64),
    /// Keeps the divisor from zero.
    pub eps: f64,
    /// How much the parameter shrinks.
    pub weight_decay: f64,
    /// `AdamW`: the parameter shrinks by itself, apart from its gradient.
    pub decoupled: bool,
}

impl AdamOptions {
    fn raw(&self, learning_rate: f64, amsgrad: bool) -> RawAdam {
        let &Self { betas: (beta1, beta2), eps, weight_decay, decoupled } = self;
        RawAdam { learning_rate, beta1, beta2, eps, weight_decay, amsgrad, decoupled }
    }
}

/// What Adam keeps of each parameter, as parallel lists.
#[derive(Debug, Clone, Copy)]
pub struct AdamState<'a> {
    /// Averages of the gradients.
    pub averages: &'a [Tensor],
    /// Averages of their squares.
    pub squares: &'a [Tensor],
    /// The largest averages of squares so far, for amsgrad; none for plain Adam.
    pub maxima: Option<&'a [Tensor]>,
    /// How many steps each has taken: one f32 each, which the call increases.
    pub steps: &'a [Tensor],
}

/// Whether `other` is laid out as the parameter, element by element in memory, and the parameter
/// has no gaps. `fits(p, p)` tells whether a fused kernel can update `p` where it lies.
pub fn fits(parameter: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both are valid; the call only reads.
    unsafe { ffi::brimful_fits(raw(parameter), raw(other)) }
}

/// One step of stochastic gradient descent; without buffers, one without momentum.
///
/// # Errors
/// When lists differ in length or tensors are not laid out alike; nothing is changed then.
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
    // SAFETY: every array has `count` valid tensors or is null where that is allowed; the bridge
    // checks that they are laid out alike before a kernel sees them.
    unsafe {
        let (parameters, gradients) = (parameters.as_ptr(), gradients.as_ptr());
        let buffers = buffers.as_ref().map_or(ptr::null(), Vec::as_ptr);
        ffi::brimful_fused_sgd(parameters, gradients, buffers, count, &options, rate)
    }
}

/// One step of Adam or `AdamW`.
///
/// # Errors
/// When lists differ in length or tensors are not laid out alike; nothing is changed then.
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

/// What Adam goes by of one parameter, and keeps of it: as it is, or as it will be.
#[derive(Debug, Clone, Copy)]
pub struct AdamNumbers<'a> {
    /// The parameter.
    pub parameter: &'a Tensor,
    /// The average of its gradients.
    pub average: &'a Tensor,
    /// The average of their squares.
    pub square: &'a Tensor,
}

impl AdamNumbers<'_> {
    fn raw(&self) -> [*const ffi::RawTensor; 3] {
        [self.parameter, self.average, self.square].map(raw)
    }
}

/// Computes what [`adam`] makes of one parameter in this step, counted from 1, beside what it is now: the same numbers
/// to the last bit, in one pass over the memory. Tells whether that is possible: for f32 on a CPU whose libtorch
/// rounds as this does.
///
/// # Errors
/// When tensors are not laid out alike; nothing is changed then.
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
    // SAFETY: both arrays have three valid tensors; the bridge checks that all are laid out alike.
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
