//! Steps of optimizers: update many parameters in one pass over their memory.
//!
//! All parameters of a call share their dtype and device. Gradients and state must match their parameter element
//! by element in memory: see [`fits`]. A call on a CPU allocates nothing, and neither does one on a GPU that our
//! kernel runs on, so it cannot run out of memory.

use std::ptr;
use tch::Tensor;

use crate::error::TorchError;
use crate::ffi::{self, RawUpdate, RawUpdateOptions};
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
    /// Decay rates of Adam's averages; of the other rules the momentum, and the dampening of SGD's.
    pub betas: (f64, f64),
    /// Epsilon, keeps Adam's divisor from zero.
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

/// Moment of a parameter: a tensor of its shape and strides, in f32, bf16, or f64 beside an f64 parameter; or 8-bit
/// codes with f32 scales, one for [`GROUP`] consecutive elements. Of 8-bit moments the first is signed (i8), the
/// others are squares (u8).
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
    /// Gradient: of any dtype but f64, or f64 like the parameter.
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

/// Returns whether `other` matches the parameter's memory element by element, in whatever dtype, and the parameter
/// has no gaps. `fits(p, p)` tests whether `p` can be updated in place.
pub fn fits(parameter: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both are valid; the call only reads.
    unsafe { ffi::brimful_fits(raw(parameter), raw(other)) }
}

/// Updates parameters in place. A `rate` multiplies that of the options: a 0-dim f32 tensor on the parameters' device,
/// which is read at its address, so that a captured CUDA graph follows its changes.
///
/// # Errors
/// When tensors do not match in memory; nothing is changed then.
pub fn update(
    all: &[Update<'_>],
    options: &Options,
    rate: Option<&Tensor>,
) -> Result<(), TorchError> {
    let all: Vec<_> = all.iter().map(Update::raw).collect();
    // SAFETY: every pointer is null or a valid tensor; the bridge checks their dtypes and memory before it reads them.
    unsafe { ffi::brimful_update(all.as_ptr(), all.len(), &options.raw(), raw_or_null(rate)) }
}

/// Computes one parameter's [`update`] on the host out of place, into `next`: the same numbers to the last bit. The
/// step counters stay as they are.
///
/// # Errors
/// As [`update`], and when the parameter is not on the host.
pub fn update_beside(
    now: &Update<'_>,
    next: &Update<'_>,
    options: &Options,
) -> Result<(), TorchError> {
    // SAFETY: as in `update`.
    unsafe { ffi::brimful_update_beside(&now.raw(), &next.raw(), &options.raw()) }
}

/// Returns an 8-bit moment in f32, with its shape and strides.
///
/// # Errors
/// When memory runs out.
pub fn unpack_moment(codes: &Tensor, scales: &Tensor) -> Result<Tensor, TorchError> {
    // SAFETY: both are valid tensors.
    unsafe { ffi::brimful_unpack_moment(raw(codes), raw(scales)) }.map(owned)
}

/// Writes f32 numbers to an 8-bit moment of the same shape and strides.
///
/// # Errors
/// When strides differ, or memory runs out.
pub fn pack_moment(numbers: &Tensor, codes: &Tensor, scales: &Tensor) -> Result<(), TorchError> {
    // SAFETY: all are valid tensors.
    unsafe { ffi::brimful_pack_moment(raw(numbers), raw(codes), raw(scales)) }
}
