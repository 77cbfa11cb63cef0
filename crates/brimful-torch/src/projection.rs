//! Linear layers and embeddings whose gradients go directly into the sums offered for them.

use std::ptr;

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

/// Weight (outputs × inputs, or inputs × outputs) and bias of a linear layer.
pub type LinearLayer<'a> = (&'a Tensor, Option<&'a Tensor>);

/// Form of the outputs of several layers on the same rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outputs {
    /// One tensor per layer.
    Apart,
    /// One tensor whose rows hold all outputs side by side.
    Joined,
}

/// Applies a linear layer: rows × inputs to rows × outputs. The weight is inputs × outputs if `inputs_first`,
/// else outputs × inputs.
///
/// # Errors
/// When shapes or dtypes do not match, or memory runs out.
pub fn projection(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    inputs_first: bool,
) -> Result<Tensor, TorchError> {
    let mut out = projections(x, &[(weight, bias)], inputs_first, Outputs::Apart)?;
    Ok(out.remove(0))
}

/// Applies several linear layers to the same rows. The backward accumulates the rows' gradient over the layers.
///
/// # Errors
/// When shapes or dtypes do not match, or memory runs out.
pub fn projections(
    x: &Tensor,
    layers: &[LinearLayer<'_>],
    inputs_first: bool,
    outputs: Outputs,
) -> Result<Vec<Tensor>, TorchError> {
    cuda_object::load_for(x);
    let (weights, biases): (Vec<_>, Vec<_>) =
        layers.iter().map(|(weight, bias)| (raw(weight), raw_or_null(*bias))).unzip();
    let joined = outputs == Outputs::Joined;
    let mut out = vec![ptr::null_mut(); if joined { 1 } else { layers.len() }];
    // SAFETY: every tensor outlives the call; a missing bias is null. `weights` and `biases` have `count` entries.
    // `out` has a place for each result, which the caller owns on success.
    unsafe {
        let (weights, biases) = (weights.as_ptr(), biases.as_ptr());
        let (count, out) = (layers.len(), out.as_mut_ptr());
        ffi::brimful_projections(raw(x), weights, biases, count, inputs_first, joined, out)
    }?;
    Ok(out.into_iter().map(owned).collect())
}

/// Returns the table's rows at these indices.
///
/// # Errors
/// When the indices are not integers, or memory runs out.
pub fn embedding(table: &Tensor, places: &Tensor) -> Result<Tensor, TorchError> {
    cuda_object::load_for(table);
    // SAFETY: both tensors are valid.
    unsafe { ffi::brimful_embedding(raw(table), raw(places)) }.map(owned)
}
