//! Gradients looked at, and taken out of their parameters into sums, a few kernels for all of them.

use std::ptr;

use tch::Tensor;

use crate::at_end::AtEnd;
use crate::error::TorchError;
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

/// Gives parameters whose gradients share memory, as those of one backward may, a copy each. Backwards of this
/// crate leave none that do.
///
/// # Errors
/// When memory runs out.
pub fn own(parameters: &[Tensor]) -> Result<(), TorchError> {
    let list = raw_list(parameters);
    // SAFETY: the array has that many valid tensors.
    unsafe { ffi::brimful_own_gradients(list.as_ptr(), list.len()) }
}

/// Runs a backward, and lets nodes of our own add to these sums on the way: such a parameter is left
/// without a gradient, and with a sum if it had none. Only on a card, where a product adds to an f32 sum in the
/// pass that computes it.
///
/// # Errors
/// Those of `run`: some sums may then have been added to.
pub fn offering(
    parameters: &[Tensor],
    sums: &mut [Option<Tensor>],
    run: impl FnOnce() -> Result<(), TorchError>,
) -> Result<(), TorchError> {
    check_pairs(parameters, sums)?;
    let (list, places) = (raw_list(parameters), raw_places(sums));
    // SAFETY: both arrays have as many entries: valid tensors, and valid tensors or null.
    unsafe { ffi::brimful_offer_sums(list.as_ptr(), places.as_ptr(), list.len()) }?;
    let _withdrawn = AtEnd(|| {
        let mut places = raw_places(sums);
        // SAFETY: as above.
        unsafe { ffi::brimful_withdraw_sums(list.as_ptr(), places.as_mut_ptr(), list.len()) }
        take_new(sums, places);
    });
    run()?;
    // SAFETY: the array has that many valid tensors. It adds up what nodes have left for the end.
    unsafe { ffi::brimful_settle_sums(list.as_ptr(), list.len()) }
}

fn check_pairs(parameters: &[Tensor], sums: &[Option<Tensor>]) -> Result<(), TorchError> {
    if parameters.len() == sums.len() {
        return Ok(());
    }
    let (p, s) = (parameters.len(), sums.len());
    Err(TorchError::other(format!("gradients need a sum a parameter: {p} and {s}")))
}

fn raw_places(sums: &[Option<Tensor>]) -> Vec<*mut ffi::RawTensor> {
    sums.iter().map(|sum| sum.as_ref().map_or(ptr::null_mut(), crate::raw_mut)).collect()
}

/// Takes over the sums that the bridge has made.
fn take_new(sums: &mut [Option<Tensor>], places: Vec<*mut ffi::RawTensor>) {
    for (sum, place) in sums.iter_mut().zip(places) {
        if sum.is_none() && !place.is_null() {
            *sum = Some(owned(place));
        }
    }
}

/// Adds each parameter's gradient to its sum, or makes it the sum where there is none yet, and leaves
/// the parameter without one. Sums of half-precision gradients are f32.
///
/// # Errors
/// When memory runs out: some gradients may then be in their sums and others lost.
pub fn collect(parameters: &[Tensor], sums: &mut [Option<Tensor>]) -> Result<(), TorchError> {
    check_pairs(parameters, sums)?;
    let (list, mut places) = (raw_list(parameters), raw_places(sums));
    // SAFETY: both arrays have as many entries: valid tensors, and valid tensors or null.
    let result = unsafe {
        let (list, places, count) = (list.as_ptr(), places.as_mut_ptr(), list.len());
        ffi::brimful_collect_gradients(list, places, count, PIECE_BYTES)
    };
    take_new(sums, places);
    result
}
