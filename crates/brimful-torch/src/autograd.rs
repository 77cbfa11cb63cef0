//! Backward passes from given gradients, and assignment of gradients.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use tch::Tensor;

use crate::at_end::AtEnd;
use crate::error::TorchError;
use crate::leaves::{KnownLeaves, Reach};
use crate::{ffi, owned_or_none, raw, raw_list, raw_or_null};

/// Runs backward from several roots at once, each with its gradient (`None` means 1, for a scalar root).
///
/// Gradients accumulate in the leaves. The graph is freed unless `keep_graph` is set.
///
/// # Errors
/// When the lists differ in length, or libtorch refuses: a root without a graph, a shape that does
/// not match, memory that runs out.
pub fn backward(
    roots: &[&Tensor],
    gradients: &[Option<&Tensor>],
    keep_graph: bool,
) -> Result<(), TorchError> {
    run(None, &[], roots, gradients, keep_graph).map(drop)
}

/// Runs [`backward`] if the roots lead only to known leaves and to `ends`. Otherwise returns one of the other
/// leaves and runs nothing.
///
/// # Errors
/// As [`backward`].
pub fn backward_to(
    known: &KnownLeaves,
    ends: &[&Tensor],
    roots: &[&Tensor],
    gradients: &[Option<&Tensor>],
    keep_graph: bool,
) -> Result<Reach<()>, TorchError> {
    let other = run(Some(known), ends, roots, gradients, keep_graph)?;
    Ok(other.map_or(Reach::Known(()), Reach::Other))
}

/// Runs a backward, or returns a leaf that is not known.
fn run(
    known: Option<&KnownLeaves>,
    ends: &[&Tensor],
    roots: &[&Tensor],
    gradients: &[Option<&Tensor>],
    keep_graph: bool,
) -> Result<Option<Tensor>, TorchError> {
    if roots.len() != gradients.len() {
        let (r, g) = (roots.len(), gradients.len());
        return Err(TorchError::other(format!("backward needs a gradient a root: {r} and {g}")));
    }
    let (roots, ends) = (raw_list(roots.iter().copied()), raw_list(ends.iter().copied()));
    let gradients: Vec<_> = gradients.iter().copied().map(raw_or_null).collect();
    let known = known.map_or(ptr::null(), KnownLeaves::raw);
    // SAFETY: each array has as many entries as the length passed with it. Its tensors outlive the call; a missing
    // gradient, or a missing list of known leaves, is null.
    let other = unsafe {
        let (ends, length) = (ends.as_ptr(), ends.len());
        let (roots, gradients, count) = (roots.as_ptr(), gradients.as_ptr(), roots.len());
        ffi::brimful_backward(roots, gradients, count, keep_graph, known, ends, length)
    }?;
    Ok(owned_or_none(other))
}

/// Runs every backward of `run`, whole or split, on libtorch's autograd engine, for comparison.
///
/// By default the engine runs only graphs that need it: those on several streams or devices, with hooks, or
/// inside another backward. All others run on the calling thread, at half the cost for the host.
pub fn by_engine<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: sets a flag of this thread.
    let before = unsafe { ffi::brimful_want_engine(true) };
    let _put_back = AtEnd(|| {
        // SAFETY: as above.
        unsafe { ffi::brimful_want_engine(before) };
    });
    run()
}

/// Runs `run`, which is one backward, and calls `arrived` with the index of each parameter as soon as the
/// parameter's gradient is complete. Other gradients may not be computed yet.
///
/// Reports only parameters on a CPU, whose backward runs on this thread.
///
/// # Errors
/// As `run`, and when memory for the watches runs out.
///
/// # Panics
/// Propagates a panic of `arrived` after the backward.
pub fn watched(
    parameters: &[Tensor],
    mut arrived: impl FnMut(usize),
    run: impl FnOnce() -> Result<(), TorchError>,
) -> Result<(), TorchError> {
    let mut listener = Listener { arrived: &mut arrived, panicked: None };
    let parameters = raw_list(parameters);
    // SAFETY: the array has `parameters.len()` valid tensors. The bridge calls `hear` only on this thread and
    // before `brimful_unwatch`. Until then the listener lives, and nothing else uses it.
    let watches = unsafe {
        let context = ptr::from_mut(&mut listener).cast();
        ffi::brimful_watch(parameters.as_ptr(), parameters.len(), hear, context)
    }?;
    let result = {
        // SAFETY: `watches` was created above, and is released only here.
        let _unwatched = AtEnd(|| unsafe { ffi::brimful_unwatch(watches) });
        run()
    };
    match listener.panicked {
        Some(payload) => panic::resume_unwind(payload),
        None => result,
    }
}

/// Receiver of completed gradients.
struct Listener<'a> {
    arrived: &'a mut dyn FnMut(usize),
    /// Panic of `arrived`, which must not cross the language boundary.
    panicked: Option<Box<dyn Any + Send>>,
}

extern "C" fn hear(context: *mut c_void, parameter: usize) {
    // SAFETY: `context` points to the listener of the `watched` that is running on this thread. `watched` does not
    // use its listener during the backward.
    let listener = unsafe { &mut *context.cast::<Listener<'_>>() };
    if listener.panicked.is_none() {
        let told = panic::catch_unwind(AssertUnwindSafe(|| (listener.arrived)(parameter)));
        listener.panicked = told.err();
    }
}

/// Returns whether two handles refer to one tensor object, as a handle and its clone do. Two tensors that only
/// share memory are not the same.
pub fn is_same(one: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both tensors are valid.
    unsafe { ffi::brimful_is_same(raw(one), raw(other)) }
}

/// Increments the tensor's version after a change that libtorch has not seen, such as a CUDA graph replay.
pub fn count_change(tensor: &Tensor) {
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_count_change(raw(tensor)) }
}

/// Replaces a leaf's gradient; `None` removes it.
///
/// # Errors
/// When the gradient does not fit the tensor.
pub fn set_gradient(tensor: &mut Tensor, gradient: Option<&Tensor>) -> Result<(), TorchError> {
    // SAFETY: `tensor` is borrowed mutably and valid; the gradient is valid or null.
    unsafe { ffi::brimful_set_gradient(tensor.as_mut_ptr().cast(), raw_or_null(gradient)) }
}
