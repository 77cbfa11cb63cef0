//! Memory format of tensors: contiguous, or channels last.

use tch::Tensor;

use crate::error::TorchError;
use crate::{ffi, owned, raw};

/// Returns the tensor in this memory format: itself, or a copy if its format differs.
///
/// # Errors
/// When the tensor does not have four or five dimensions, or memory runs out.
pub fn to_memory_format(tensor: &Tensor, channels_last: bool) -> Result<Tensor, TorchError> {
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_to_memory_format(raw(tensor), channels_last) }.map(owned)
}

/// Changes the memory format in place, for all handles of the tensor and for its gradient.
///
/// # Errors
/// When the tensor does not have four or five dimensions, or memory runs out: the tensor is then unchanged.
pub fn set_memory_format(tensor: &mut Tensor, channels_last: bool) -> Result<(), TorchError> {
    // SAFETY: the tensor is valid and borrowed mutably.
    unsafe { ffi::brimful_set_memory_format(tensor.as_mut_ptr().cast(), channels_last) }
}
