//! Foreach operations: one operation on many tensors at once, in place and outside autograd.
//!
//! On CUDA a whole list takes a few kernel launches. Lists of mixed devices, dtypes or memory formats also work,
//! but slower: libtorch loops over them.

use tch::Tensor;

use crate::error::TorchError;
use crate::{ffi, owned, raw, raw_list};

/// Multiplies every tensor by a number.
///
/// # Errors
/// When a tensor's dtype cannot hold the product.
pub fn scale(tensors: &[Tensor], factor: f64) -> Result<(), TorchError> {
    let list = raw_list(tensors);
    // SAFETY: the array has `list.len()` valid tensors.
    unsafe { ffi::brimful_foreach_scale(list.as_ptr(), list.len(), factor) }
}

/// Multiplies every tensor by a 0-dim tensor. The host does not wait for the factor's value if it is on the
/// tensors' device. The factor is rounded to each tensor's dtype first.
///
/// # Errors
/// When the factor has dimensions, or memory runs out.
pub fn scale_by(tensors: &[Tensor], factor: &Tensor) -> Result<(), TorchError> {
    let list = raw_list(tensors);
    // SAFETY: the array has `list.len()` valid tensors, and the factor is valid.
    unsafe { ffi::brimful_foreach_scale_by(list.as_ptr(), list.len(), raw(factor)) }
}

/// Adds `factor` times the second list to the first.
///
/// # Errors
/// When the lists or two of their tensors do not match.
pub fn add(into: &[Tensor], what: &[Tensor], factor: f64) -> Result<(), TorchError> {
    same_length("add", into, what)?;
    let (into, what) = (raw_list(into), raw_list(what));
    // SAFETY: both arrays have `into.len()` valid tensors.
    unsafe { ffi::brimful_foreach_add(into.as_ptr(), what.as_ptr(), into.len(), factor) }
}

/// Copies the second list into the first, across dtypes, memory formats and devices.
///
/// # Errors
/// When the lists or two of their tensors do not match.
pub fn copy(into: &[Tensor], from: &[Tensor]) -> Result<(), TorchError> {
    same_length("copy", into, from)?;
    let (into, from) = (raw_list(into), raw_list(from));
    // SAFETY: both arrays have `into.len()` valid tensors.
    unsafe { ffi::brimful_foreach_copy(into.as_ptr(), from.as_ptr(), into.len()) }
}

/// Sets every tensor to zero.
///
/// # Errors
/// When libtorch refuses.
pub fn zero(tensors: &[Tensor]) -> Result<(), TorchError> {
    let list = raw_list(tensors);
    // SAFETY: the array has `list.len()` valid tensors.
    unsafe { ffi::brimful_foreach_zero(list.as_ptr(), list.len()) }
}

/// Returns the 2-norm of all tensors taken as one vector: a 0-dim tensor on the first one's device. The host does
/// not wait if all are on one device. Half-precision tensors are summed in f32.
///
/// # Errors
/// When the list is empty, or memory runs out.
pub fn norm(tensors: &[Tensor]) -> Result<Tensor, TorchError> {
    norm_of_order(tensors, 2.0)
}

/// Returns the largest absolute value in all tensors, as a 0-dim tensor like that of [`norm`]. The value is finite
/// for finite tensors, even if the sum of their squares would overflow.
///
/// # Errors
/// As [`norm`].
pub fn largest(tensors: &[Tensor]) -> Result<Tensor, TorchError> {
    norm_of_order(tensors, f64::INFINITY)
}

fn norm_of_order(tensors: &[Tensor], order: f64) -> Result<Tensor, TorchError> {
    let list = raw_list(tensors);
    // SAFETY: the array has `list.len()` valid tensors.
    unsafe { ffi::brimful_foreach_norm(list.as_ptr(), list.len(), order) }.map(owned)
}

fn same_length(what: &str, a: &[Tensor], b: &[Tensor]) -> Result<(), TorchError> {
    let (a, b) = (a.len(), b.len());
    if a == b {
        return Ok(());
    }
    Err(TorchError::other(format!("{what} needs two lists of one length: {a}, {b}")))
}
