//! Linear layers, and rows of a table, whose gradients go straight into the sums that are offered for them.

use std::ptr;

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

/// A linear layer's own: a weight of outputs × inputs, or of inputs × outputs, and a bias.
pub type LinearLayer<'a> = (&'a Tensor, Option<&'a Tensor>);

/// What several layers make of the same rows is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outputs {
    /// As a tensor of each.
    Apart,
    /// As one tensor, whose rows have them side by side.
    Joined,
}

/// Rows × inputs to rows × outputs, by a weight of outputs × inputs, or of inputs × outputs.
///
/// # Errors
/// When shapes or kinds do not match, or memory runs out.
pub fn projection(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    inputs_first: bool,
) -> Result<Tensor, TorchError> {
    let mut out = projections(x, &[(weight, bias)], inputs_first, Outputs::Apart)?;
    Ok(out.remove(0))
}

/// The same by several layers at once: the gradient of the rows is added up as it is computed.
///
/// # Errors
/// When shapes or kinds do not match, or memory runs out.
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
    // SAFETY: every tensor is valid, or null where that is allowed; both lists have as many, and there is room
    // for all results, which on success are new ones of ours.
    unsafe {
        let (weights, biases) = (weights.as_ptr(), biases.as_ptr());
        let (count, out) = (layers.len(), out.as_mut_ptr());
        ffi::brimful_projections(raw(x), weights, biases, count, inputs_first, joined, out)
    }?;
    Ok(out.into_iter().map(owned).collect())
}

/// The table's rows at these places.
///
/// # Errors
/// When the places are no integers, or memory runs out.
pub fn embedding(table: &Tensor, places: &Tensor) -> Result<Tensor, TorchError> {
    cuda_object::load_for(table);
    // SAFETY: both tensors are valid.
    unsafe { ffi::brimful_embedding(raw(table), raw(places)) }.map(owned)
}
