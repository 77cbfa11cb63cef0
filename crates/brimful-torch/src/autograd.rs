//! Backward passes that start from given gradients, and gradients put in place by hand.

use std::ptr;
use tch::Tensor;

use crate::error::{TorchError, call};
use crate::{ffi, raw};

/// Runs backward from several roots at once, each with its gradient (`None`: one, for a scalar).
///
/// Gradients are added to those of the leaves. The graph is freed unless `keep_graph` is set.
///
/// # Errors
/// When the lists differ in length, or libtorch refuses: a root without a graph, a shape that does
/// not match, memory that runs out.
pub fn backward(
    roots: &[&Tensor],
    gradients: &[Option<&Tensor>],
    keep_graph: bool,
) -> Result<(), TorchError> {
    if roots.len() != gradients.len() {
        let (r, g) = (roots.len(), gradients.len());
        return Err(TorchError::other(format!("backward needs a gradient a root: {r} and {g}")));
    }
    let roots: Vec<_> = roots.iter().map(|root| raw(root)).collect();
    let gradients: Vec<_> = gradients.iter().map(|g| g.map_or(ptr::null(), raw)).collect();
    call(|message| {
        // SAFETY: both arrays have `roots.len()` valid tensors, or null where that is allowed.
        unsafe {
            let (roots, gradients, count) = (roots.as_ptr(), gradients.as_ptr(), roots.len());
            ffi::brimful_backward(roots, gradients, count, keep_graph, message)
        }
    })
}

/// Puts a gradient in place of a leaf's present one; `None` leaves it without one.
///
/// # Errors
/// When the gradient does not fit the tensor.
pub fn set_gradient(tensor: &mut Tensor, gradient: Option<&Tensor>) -> Result<(), TorchError> {
    let gradient = gradient.map_or(ptr::null(), raw);
    // SAFETY: `tensor` is borrowed mutably and valid; the gradient is valid or null.
    call(|message| unsafe {
        ffi::brimful_set_gradient(tensor.as_mut_ptr().cast(), gradient, message)
    })
}
