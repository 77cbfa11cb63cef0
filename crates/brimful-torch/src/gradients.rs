//! Inspection of gradients, and their transfer into sums in a few kernel launches.

use std::ptr;

use tch::Tensor;

use crate::at_end::AtEnd;
use crate::error::TorchError;
use crate::{ffi, owned, raw_list};

/// Half-precision gradients are converted to f32 in pieces of about this many bytes.
const PIECE_BYTES: i64 = 64 << 20;

/// Returns the index of the first parameter with a sparse gradient, such as one from `nn::embedding`. Reads no
/// values.
pub fn first_sparse(parameters: &[Tensor]) -> Option<usize> {
    let list = raw_list(parameters);
    // SAFETY: the array has `list.len()` valid tensors.
    let at = unsafe { ffi::brimful_first_sparse_gradient(list.as_ptr(), list.len()) };
    (at < list.len()).then_some(at)
}

/// Copies gradients that share memory, so that each parameter has its own. libtorch's backward may leave such
/// gradients; the backwards of this crate do not.
///
/// # Errors
/// When memory runs out.
pub fn own(parameters: &[Tensor]) -> Result<(), TorchError> {
    let list = raw_list(parameters);
    // SAFETY: the array has `list.len()` valid tensors.
    unsafe { ffi::brimful_own_gradients(list.as_ptr(), list.len()) }
}

/// Runs a backward whose custom autograd nodes add directly into these sums. A parameter of such a node is left
/// without a gradient, and gets a sum if it had none. Applies only on a GPU, where a product adds into an f32 sum in
/// the same kernel.
///
/// # Errors
/// As `run`. Some sums may then include gradients of the failed backward.
pub fn offering(
    parameters: &[Tensor],
    sums: &mut [Option<Tensor>],
    run: impl FnOnce() -> Result<(), TorchError>,
) -> Result<(), TorchError> {
    check_pairs(parameters, sums)?;
    let (list, places) = (raw_list(parameters), raw_places(sums));
    // SAFETY: both arrays have `list.len()` entries. Entries of `list` are valid tensors; entries of `places` are
    // valid tensors or null.
    unsafe { ffi::brimful_offer_sums(list.as_ptr(), places.as_ptr(), list.len()) }?;
    let _withdrawn = AtEnd(|| {
        let mut places = raw_places(sums);
        // SAFETY: as above.
        unsafe { ffi::brimful_withdraw_sums(list.as_ptr(), places.as_mut_ptr(), list.len()) }
        take_new(sums, places);
    });
    run()?;
    // SAFETY: the array has `list.len()` valid tensors. The call adds up the partial sums that nodes have deferred
    // to the end of the backward.
    unsafe { ffi::brimful_settle_sums(list.as_ptr(), list.len()) }
}

fn check_pairs(parameters: &[Tensor], sums: &[Option<Tensor>]) -> Result<(), TorchError> {
    if parameters.len() == sums.len() {
        return Ok(());
    }
    let (p, s) = (parameters.len(), sums.len());
    Err(TorchError::other(format!("gradients need one sum per parameter: {p} and {s}")))
}

fn raw_places(sums: &[Option<Tensor>]) -> Vec<*mut ffi::RawTensor> {
    sums.iter().map(|sum| sum.as_ref().map_or(ptr::null_mut(), crate::raw_mut)).collect()
}

/// Takes ownership of the sums that the bridge created.
fn take_new(sums: &mut [Option<Tensor>], places: Vec<*mut ffi::RawTensor>) {
    for (sum, place) in sums.iter_mut().zip(places) {
        if sum.is_none() && !place.is_null() {
            *sum = Some(owned(place));
        }
    }
}

/// Transfers each parameter's gradient into its sum: adds it, or makes it the sum if there is none yet. The parameter
/// is left without a gradient. Sums of half-precision gradients are f32.
///
/// # Errors
/// When memory runs out: some gradients may then be in their sums and others lost.
pub fn collect(parameters: &[Tensor], sums: &mut [Option<Tensor>]) -> Result<(), TorchError> {
    check_pairs(parameters, sums)?;
    let (list, mut places) = (raw_list(parameters), raw_places(sums));
    // SAFETY: both arrays have `list.len()` entries. Entries of `list` are valid tensors; entries of `places` are
    // valid tensors or null.
    let result = unsafe {
        let (list, places, count) = (list.as_ptr(), places.as_mut_ptr(), list.len());
        ffi::brimful_collect_gradients(list, places, count, PIECE_BYTES)
    };
    take_new(sums, places);
    result
}
