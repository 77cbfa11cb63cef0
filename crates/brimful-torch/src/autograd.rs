//! Backward passes that start from given gradients, and gradients put in place by hand.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use tch::Tensor;

use crate::at_end::AtEnd;
use crate::error::TorchError;
use crate::leaves::{KnownLeaves, Reach};
use crate::{ffi, owned_or_none, raw, raw_list, raw_or_null};

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
    run(None, &[], roots, gradients, keep_graph).map(drop)
}

/// The same where the roots lead to known leaves, and to `ends`, alone. Otherwise one of the others is given, and
/// nothing is run.
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

/// Runs a backward, or gives a leaf that is not known.
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
    // SAFETY: the arrays have that many valid tensors, or null where that is allowed.
    let other = unsafe {
        let (ends, length) = (ends.as_ptr(), ends.len());
        let (roots, gradients, count) = (roots.as_ptr(), gradients.as_ptr(), roots.len());
        ffi::brimful_backward(roots, gradients, count, keep_graph, known, ends, length)
    }?;
    Ok(owned_or_none(other))
}

/// Lets libtorch's engine run every backward of `run`, whole or in halves: to compare.
///
/// Otherwise it runs those alone that need it: graphs on several streams or devices, with hooks, or inside
/// another backward. All others run on the thread that asks for them, at half the cost for the host.
pub fn by_engine<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: it sets a flag of this thread.
    let before = unsafe { ffi::brimful_want_engine(true) };
    let _put_back = AtEnd(|| {
        // SAFETY: as above.
        unsafe { ffi::brimful_want_engine(before) };
    });
    run()
}

/// Calls `arrived` with the place of each parameter to whose gradient `run`, one backward, has added all
/// that it adds, while those of others are still being computed.
///
/// That is so for parameters on a CPU, whose backward runs on this thread; of others nothing is told.
///
/// # Errors
/// As `run`, and when there is no memory to watch the parameters.
///
/// # Panics
/// As `arrived` does, after the backward.
pub fn watched(
    parameters: &[Tensor],
    mut arrived: impl FnMut(usize),
    run: impl FnOnce() -> Result<(), TorchError>,
) -> Result<(), TorchError> {
    let mut listener = Listener { arrived: &mut arrived, panicked: None };
    let parameters = raw_list(parameters);
    // SAFETY: the array has that many valid tensors. `hear` is called on this thread alone and while
    // the watches live, in which nobody else uses the listener.
    let watches = unsafe {
        let context = ptr::from_mut(&mut listener).cast();
        ffi::brimful_watch(parameters.as_ptr(), parameters.len(), hear, context)
    }?;
    let result = {
        // SAFETY: made above, and given back once.
        let _unwatched = AtEnd(|| unsafe { ffi::brimful_unwatch(watches) });
        run()
    };
    match listener.panicked {
        Some(payload) => panic::resume_unwind(payload),
        None => result,
    }
}

/// Who is told of gradients.
struct Listener<'a> {
    arrived: &'a mut dyn FnMut(usize),
    /// A panic, which must not cross the boundary.
    panicked: Option<Box<dyn Any + Send>>,
}

extern "C" fn hear(context: *mut c_void, parameter: usize) {
    // SAFETY: it is the listener of the backward that is under way on this thread.
    let listener = unsafe { &mut *context.cast::<Listener<'_>>() };
    if listener.panicked.is_none() {
        let told = panic::catch_unwind(AssertUnwindSafe(|| (listener.arrived)(parameter)));
        listener.panicked = told.err();
    }
}

/// Whether both are one tensor, of which one may be a clone: not two that share their memory.
pub fn is_same(one: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both tensors are valid.
    unsafe { ffi::brimful_is_same(raw(one), raw(other)) }
}

/// Counts a change of the tensor's numbers by work that libtorch has not seen, such as a replay: its
/// version is another one from now on.
pub fn count_change(tensor: &Tensor) {
    // SAFETY: the tensor is valid.
    unsafe { ffi::brimful_count_change(raw(tensor)) }
}

/// Puts a gradient in place of a leaf's present one; `None` leaves it without one.
///
/// # Errors
/// When the gradient does not fit the tensor.
pub fn set_gradient(tensor: &mut Tensor, gradient: Option<&Tensor>) -> Result<(), TorchError> {
    // SAFETY: `tensor` is borrowed mutably and valid; the gradient is valid or null.
    unsafe { ffi::brimful_set_gradient(tensor.as_mut_ptr().cast(), raw_or_null(gradient)) }
}
