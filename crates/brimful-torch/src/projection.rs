//! A linear layer, and rows of a table, whose gradients go straight into the sums that are offered for them.

use std::ptr;

use tch::Tensor;

use crate::error::{TorchError, call};
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

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
    cuda_object::load_for(x);
    let mut out = ptr::null_mut();
    // SAFETY: every tensor is valid, or null where that is allowed; on success the result is a new one of
    // ours.
    call(|message| unsafe {
        let bias = raw_or_null(bias);
        ffi::brimful_projection(raw(x), raw(weight), bias, inputs_first, &mut out, message)
    })?;
    Ok(owned(out))
}

/// The table's rows at these places.
///
/// # Errors
/// When the places are no integers, or memory runs out.
pub fn embedding(table: &Tensor, places: &Tensor) -> Result<Tensor, TorchError> {
    cuda_object::load_for(table);
    let mut out = ptr::null_mut();
    // SAFETY: both tensors are valid; on success the result is a new one of ours.
    call(|message| unsafe { ffi::brimful_embedding(raw(table), raw(places), &mut out, message) })?;
    Ok(owned(out))
}
