//! Steps of optimizers: update many parameters in one pass over their memory.
//!
//! All parameters of a call share their dtype and device. Gradients and state must match their parameter element
//! by element in memory: see [`fits`]. A call allocates nothing on a CPU, nor on a GPU where the custom kernel runs,
//! so it cannot run out of memory there.

use std::ptr;
use tch::Tensor;

use crate::cuda_object;
use crate::error::TorchError;
use crate::ffi::{self, RawAdafactor, RawMuon, RawUpdate, RawUpdateOptions};
use crate::{owned, raw, raw_or_null};

/// Consecutive elements of an 8-bit moment that share a scale.
pub const GROUP: usize = 128;

/// Largest number of moments of a parameter.
pub const MOMENTS: usize = 3;

/// Rule of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// SGD, with momentum if there is a moment.
    Sgd,
    /// Adam; with a third moment, amsgrad.
    Adam,
    /// Momentum alone: the direction of the step is written in the parameter's place.
    Direction,
}

/// Settings of an update.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Rule.
    pub rule: Rule,
    /// Learning rate.
    pub rate: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether weight decay shrinks the parameter, instead of adding to its gradient.
    pub decoupled: bool,
    /// Decay rates of Adam's averages. For the other rules the first is the momentum; for SGD the second is the
    /// dampening.
    pub betas: (f64, f64),
    /// Epsilon: keeps Adam's divisor from zero.
    pub eps: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
}

impl Options {
    fn raw(&self) -> RawUpdateOptions {
        let &Self { rule, rate, weight_decay, decoupled, betas: (beta1, beta2), eps, nesterov } =
            self;
        RawUpdateOptions {
            rate,
            weight_decay,
            eps,
            beta1,
            beta2,
            rule: rule as i32,
            nesterov,
            decoupled,
        }
    }
}

/// Moment of a parameter, with the parameter's shape and strides. Its elements are f32 or bf16, f64 beside an f64
/// parameter, or 8-bit codes with an f32 scale for each [`GROUP`] consecutive elements. The first 8-bit moment is
/// signed (i8), the others are squares (u8).
#[derive(Debug, Clone, Copy)]
pub struct Moment<'a> {
    /// Elements.
    pub elements: &'a Tensor,
    /// Scales of 8-bit elements.
    pub scales: Option<&'a Tensor>,
}

/// Parameter with its gradient and state.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// Parameter, or place of a direction.
    pub parameter: &'a Tensor,
    /// Gradient: f64 if the parameter is f64, else any other floating-point dtype.
    pub gradient: &'a Tensor,
    /// Remainder (i16) of a bf16 parameter, or f32 master of an f16 one.
    pub master: Option<&'a Tensor>,
    /// Number of earlier steps: one f32, incremented by the call.
    pub step: Option<&'a Tensor>,
    /// Moments, at most [`MOMENTS`].
    pub moments: &'a [Moment<'a>],
    /// Whether this is the first step: SGD's momentum begins with the gradient.
    pub first: bool,
}

impl Update<'_> {
    fn raw(&self) -> RawUpdate {
        let mut moments = [ptr::null(); MOMENTS];
        let mut scales = [ptr::null(); MOMENTS];
        for (at, moment) in self.moments.iter().take(MOMENTS).enumerate() {
            moments[at] = raw(moment.elements);
            scales[at] = raw_or_null(moment.scales);
        }
        RawUpdate {
            parameter: raw(self.parameter),
            gradient: raw(self.gradient),
            master: raw_or_null(self.master),
            step: raw_or_null(self.step),
            moments,
            scales,
            first: self.first,
        }
    }
}

/// Returns whether `other` has the parameter's device, shape and strides, and the parameter's memory has no gaps.
/// Dtypes may differ. `fits(p, p)` tests whether `p` can be updated in place.
pub fn fits(parameter: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both tensors are valid, and the call only reads them.
    unsafe { ffi::brimful_fits(raw(parameter), raw(other)) }
}

/// Updates parameters in place. `rate`, a 0-dim f32 tensor on the parameters' device, multiplies the rate of the
/// options. The kernel reads `rate` at its address, so a captured CUDA graph uses its current value.
///
/// # Errors
/// When tensors do not match in memory; nothing is changed then.
pub fn update(
    all: &[Update<'_>],
    options: &Options,
    rate: Option<&Tensor>,
) -> Result<(), TorchError> {
    if let Some(first) = all.first() {
        cuda_object::load_for(first.parameter);
    }
    let all: Vec<_> = all.iter().map(Update::raw).collect();
    // SAFETY: every pointer is null or a valid tensor; the bridge checks their dtypes and memory before it reads them.
    unsafe { ffi::brimful_update(all.as_ptr(), all.len(), &options.raw(), raw_or_null(rate)) }
}

/// Settings of [`muon`], beside those of its momentum.
#[derive(Debug, Clone, Copy)]
pub struct MuonOptions {
    /// Coefficients of a step of Newton and Schulz's iteration: of X, XXᵀX and (XXᵀ)²X.
    pub coefficients: [f64; 3],
    /// Number of the iteration's steps.
    pub steps: u32,
    /// Least norm that a direction is divided by.
    pub eps: f64,
}

/// Returns the number of elements of scratch memory that [`muon`] needs for a matrix of this shape.
pub fn muon_scratch(rows: usize, columns: usize) -> usize {
    let side = rows.min(columns);
    2 * rows * columns + 2 * side * side + rows + 1
}

/// Updates one contiguous matrix along its orthogonalized momentum, which is the update's only moment. `options`
/// has the momentum's settings, the learning rate and the weight decay; a tensor `rate` multiplies the learning
/// rate. Products are computed in the dtype of the scratch memory: f64 for an f64 parameter, else f32 or bf16. On
/// a CPU the call allocates nothing.
///
/// # Errors
/// As [`update`], and when the parameter is no contiguous matrix. If memory runs out on a GPU, some tensors may have
/// changed.
pub fn muon(
    one: &Update<'_>,
    options: &Options,
    muon: &MuonOptions,
    scratch: &Tensor,
    rate: Option<&Tensor>,
) -> Result<(), TorchError> {
    cuda_object::load_for(one.parameter);
    let &MuonOptions { coefficients: [a, b, c], steps, eps } = muon;
    let muon = RawMuon { a, b, c, eps, steps: steps.into() };
    // SAFETY: as in `update`. The bridge checks the bounds of the scratch memory.
    unsafe { ffi::brimful_muon(&one.raw(), &options.raw(), &muon, raw(scratch), raw_or_null(rate)) }
}

/// Settings of [`adafactor`].
#[derive(Debug, Clone, Copy)]
pub struct AdafactorOptions {
    /// Exponent of the step number: a step's share in the averages is `step^beta2_decay`.
    pub beta2_decay: f64,
    /// Epsilon of the squared gradients' averages, and least root mean square of a parameter.
    pub eps: (f64, f64),
    /// Largest root mean square of a direction; a longer direction is shortened to it.
    pub threshold: f64,
}

/// Returns the number of elements of scratch memory that [`adafactor`] needs for a parameter of this shape.
pub fn adafactor_scratch(shape: &[i64]) -> usize {
    let numbers = shape.iter().product::<i64>() as usize;
    // Two tensors of the parameter's size, a matrix's rows, columns and means, and the numbers of a step.
    let last = |at: usize| shape.iter().rev().nth(at).map_or(1, |size| (*size).max(1) as usize);
    let (rows, columns) = (numbers / last(0), numbers / last(1));
    2 * numbers + rows + columns + rows / last(1) + 32
}

/// Updates one contiguous parameter by averages of its squared gradients: over rows and over columns of its last
/// two dimensions, or of each element of a vector. The averages are its moments, of the scratch memory's dtype:
/// f64 for an f64 parameter, else f32. On a CPU the call allocates nothing.
///
/// # Errors
/// As [`muon`].
pub fn adafactor(
    one: &Update<'_>,
    options: &Options,
    factored: &AdafactorOptions,
    scratch: &Tensor,
    rate: Option<&Tensor>,
) -> Result<(), TorchError> {
    cuda_object::load_for(one.parameter);
    let &AdafactorOptions { beta2_decay, eps: (eps1, eps2), threshold } = factored;
    let factored = RawAdafactor { beta2_decay, eps1, eps2, threshold };
    // SAFETY: as in `muon`.
    unsafe {
        ffi::brimful_adafactor(
            &one.raw(),
            &options.raw(),
            &factored,
            raw(scratch),
            raw_or_null(rate),
        )
    }
}

/// Returns an 8-bit moment in f32, with its shape and strides.
///
/// # Errors
/// When memory runs out.
pub fn unpack_moment(codes: &Tensor, scales: &Tensor) -> Result<Tensor, TorchError> {
    // SAFETY: `codes` and `scales` are valid tensors.
    unsafe { ffi::brimful_unpack_moment(raw(codes), raw(scales)) }.map(owned)
}

/// Writes f32 numbers to an 8-bit moment of the same shape and strides.
///
/// # Errors
/// When strides differ, or memory runs out.
pub fn pack_moment(numbers: &Tensor, codes: &Tensor, scales: &Tensor) -> Result<(), TorchError> {
    // SAFETY: all three are valid tensors.
    unsafe { ffi::brimful_pack_moment(raw(numbers), raw(codes), raw(scales)) }
}
