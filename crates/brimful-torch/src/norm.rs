//! LayerNorm and RMSNorm, with a fused residual addition.

use std::ptr;

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

/// Normalisation of rows.
#[derive(Debug, Clone, Copy)]
pub struct RowNorm<'a> {
    /// Factor of each column; 1 if absent.
    pub weight: Option<&'a Tensor>,
    /// Addend of each column; 0 if absent, and for RMSNorm.
    pub bias: Option<&'a Tensor>,
    /// Epsilon added to the variance, or to the mean square.
    pub eps: f64,
    /// True for RMSNorm, which does not subtract the mean.
    pub root_mean_square: bool,
}

/// Normalises the rows of `x` along its last dimension.
///
/// # Errors
/// When weight or bias do not fit, or memory runs out.
pub fn norm(x: &Tensor, how: RowNorm<'_>) -> Result<Tensor, TorchError> {
    run(x, None, how, ptr::null_mut())
}

/// Normalises `x`, and also returns `x` for callers that use it beside the norm. The backward then adds the
/// gradients of both uses in one pass.
///
/// # Errors
/// When weight or bias do not fit, or memory runs out.
pub fn norm_beside(x: &Tensor, how: RowNorm<'_>) -> Result<(Tensor, Tensor), TorchError> {
    let mut same = ptr::null_mut();
    let normed = run(x, None, how, &mut same)?;
    Ok((owned(same), normed))
}

/// Adds the residual first. Returns the sum and the normalised sum.
///
/// # Errors
/// When the residual, weight or bias do not fit, or memory runs out.
pub fn add_norm(
    x: &Tensor,
    residual: &Tensor,
    how: RowNorm<'_>,
) -> Result<(Tensor, Tensor), TorchError> {
    let mut sum = ptr::null_mut();
    let normed = run(x, Some(residual), how, &mut sum)?;
    Ok((owned(sum), normed))
}

fn run(
    x: &Tensor,
    residual: Option<&Tensor>,
    how: RowNorm<'_>,
    sum: *mut *mut ffi::RawTensor,
) -> Result<Tensor, TorchError> {
    cuda_object::load_for(x);
    let RowNorm { weight, bias, eps, root_mean_square } = how;
    let [residual, weight, bias] = [residual, weight, bias].map(raw_or_null);
    // SAFETY: every tensor outlives the call; missing ones are null, as is `sum` if no sum is requested. The
    // bridge checks that shapes fit. On success the caller owns the results.
    unsafe { ffi::brimful_norm(raw(x), residual, weight, bias, eps, root_mean_square, sum) }
        .map(owned)
}
