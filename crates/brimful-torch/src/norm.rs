//! LayerNorm and RMSNorm, with an addition before them.

use std::ptr;

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

/// How rows are normed.
#[derive(Debug, Clone, Copy)]
pub struct RowNorm<'a> {
    /// One factor a column; 1 without.
    pub weight: Option<&'a Tensor>,
    /// What is added to each column; nothing without, and for a root mean square.
    pub bias: Option<&'a Tensor>,
    /// Added to the variance, or to the mean square.
    pub eps: f64,
    /// By the root of the mean square alone, without taking the mean away.
    pub root_mean_square: bool,
}

/// Norms the rows of `x`, which are along its last dimension.
///
/// # Errors
/// When weight or bias do not fit, or memory runs out.
pub fn norm(x: &Tensor, how: RowNorm<'_>) -> Result<Tensor, TorchError> {
    run(x, None, how, ptr::null_mut())
}

/// Gives `x` itself beside, for who uses both: their gradients are added on the way.
///
/// # Errors
/// When weight or bias do not fit, or memory runs out.
pub fn norm_beside(x: &Tensor, how: RowNorm<'_>) -> Result<(Tensor, Tensor), TorchError> {
    let mut same = ptr::null_mut();
    let normed = run(x, None, how, &mut same)?;
    Ok((owned(same), normed))
}

/// Adds the residual first: gives the sum, and the sum normed.
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
    // SAFETY: every tensor is valid, or null where that is allowed; the bridge checks that they fit. On
    // success the sum is a new one of ours, where it is asked for.
    unsafe { ffi::brimful_norm(raw(x), residual, weight, bias, eps, root_mean_square, sum) }
        .map(owned)
}
