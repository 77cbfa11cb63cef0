//! The order of a tensor's numbers in memory: as its dimensions are, or with the channels last.

use tch::Tensor;

use crate::error::TorchError;
use crate::{ffi, owned, raw};

/// The same tensor, or a copy of it where its numbers are in another order.
///
/// # Errors
/// When it does not have four or five dimensions, or memory runs out.
pub fn laid_out(tensor: &Tensor, channels_last: bool) -> Result<Tensor, TorchError> {
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_laid_out(raw(tensor), channels_last) }.map(owned)
}

/// Changes the order in place, for all that share the tensor, and of its gradient as well.
///
/// # Errors
/// When it does not have four or five dimensions, or memory runs out: then it is as it was.
pub fn lay_out(tensor: &mut Tensor, channels_last: bool) -> Result<(), TorchError> {
    // SAFETY: the tensor is valid and borrowed mutably.
    unsafe { ffi::brimful_lay_out(tensor.as_mut_ptr().cast(), channels_last) }
}
