//! Gradients looked at, and taken out of their parameters into sums, a few kernels for all of them.

use std::ptr;

use tch::Tensor;

use crate::error::{TorchError, call};
use crate::{ffi, owned, raw_list};

/// Half-precision gradients are converted to f32 in pieces of about this many bytes.
const PIECE_BYTES: i64 = 64 << 20;

/// The place of the first parameter whose gradient is sparse, as that of `nn::embedding` may be. No
/// number is read.
pub fn first_sparse(parameters: &[Tensor]) -> Option<usize> {
    let list = raw_list(parameters);
    // SAFETY: the array has that many valid tensors.
    let at = unsafe { ffi::brimful_first_sparse_gradient(list.as_ptr(), list.len()) };
    (at < list.len()).then_some(at)
}

/// Adds each parameter's gradient to its sum, or makes it the sum where there is none yet, and leaves
/// the parameter without one. Sums of half-precision gradients are f32.
///
/// # Errors
/// When memory runs out: some gradients may then be in their sums and others lost.
pub fn collect(parameters: &[Tensor], sums: &mut [Option<Tensor>]) -> Result<(), TorchError> {
    if parameters.len() != sums.len() {
        let (p, s) = (parameters.len(), sums.len());
        return Err(TorchError::other(format!("collect needs a sum a parameter: {p} and {s}")));
    }
    let list = raw_list(parameters);
    let mut places: Vec<_> =
        sums.iter().map(|sum| sum.as_ref().map_or(ptr::null_mut(), crate::raw_mut)).collect();
    let known: Vec<bool> = sums.iter().map(Option::is_some).collect();
    let count = list.len();
    // SAFETY: both arrays have `count` entries: valid tensors, and valid tensors or null.
    let result = call(|message| unsafe {
        let (list, places) = (list.as_ptr(), places.as_mut_ptr());
        ffi::brimful_collect_gradients(list, places, count, PIECE_BYTES, message)
    });
    for ((sum, place), known) in sums.iter_mut().zip(places).zip(known) {
        if !known && !place.is_null() {
            *sum = Some(owned(place));
        }
    }
    result
}
