//! Clips the common norm of gradients.

use brimful_torch::foreach;
use tch::Tensor;

use super::OptimError;
use super::number_options::within;
use crate::Result;

/// Keeps the divisor from zero, as in PyTorch.
const EPS: f64 = 1e-6;

/// Norm of the gradients before clipping. The norm is a tensor on the gradients' device, so clipping does not wait
/// for the device, except in a pipeline.
#[derive(Debug)]
pub struct GradientNorm(Tensor);

impl GradientNorm {
    pub(crate) fn of(norm: f64) -> Self {
        Self(Tensor::from(norm))
    }

    /// Returns the number, which waits for the device.
    ///
    /// # Errors
    /// When the device reports an earlier failure.
    pub fn value(&self) -> Result<f64> {
        Ok(self.0.f_double_value(&[])?)
    }

    /// Returns the 0-dim tensor, without waiting for the device.
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }
}

/// Multiplies all gradients by one factor so that their 2-norm, taken as one vector, is at most `max_norm`;
/// gradients of a smaller norm stay unchanged. Returns the norm before clipping.
///
/// If the norm is NaN, all gradients become NaN. If it is infinite, finite elements become 0 and infinite ones NaN.
/// Half-precision gradients are multiplied by the factor rounded to their dtype, so their norm may exceed the
/// bound by that rounding.
///
/// # Errors
/// When `max_norm` is not above 0, no parameter has a gradient, or memory runs out. The gradients are
/// unchanged then.
pub fn clip_gradient_norm<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    max_norm: f64,
) -> Result<GradientNorm> {
    check_max_norm(max_norm)?;
    let all: Vec<Tensor> = parameters.into_iter().map(Tensor::grad).collect();
    let parameters = all.len();
    let gradients: Vec<Tensor> = all.into_iter().filter(Tensor::defined).collect();
    if gradients.is_empty() {
        return Err(OptimError::NoGradient { parameters }.into());
    }
    let norm = foreach::norm(&gradients)?;
    let factor =
        (norm.f_add_scalar(EPS)?.f_reciprocal()?.f_mul_scalar(max_norm)?).f_clamp_max(1.0)?;
    foreach::scale_by(&gradients, &factor)?;
    Ok(GradientNorm(norm))
}

pub(crate) fn check_max_norm(max_norm: f64) -> Result<()> {
    within("max_norm", max_norm, max_norm > 0.0, "give a number above 0")
}

/// Returns the factor for gradients of this norm: at most 1, 0 for an infinite norm, and NaN for NaN.
pub(crate) fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    let factor = max_norm / (norm + EPS);
    if factor > 1.0 { 1.0 } else { factor }
}
