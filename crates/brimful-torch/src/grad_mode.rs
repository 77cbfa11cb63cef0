//! Gradient mode of a thread: whether operations record autograd graphs.
//!
//! libtorch keeps the mode for the whole thread. If it were not set anew for each piece of work, a guard that a layer
//! or a closure forgets to drop would affect all later work of the thread.

use std::marker::PhantomData;

use torch_sys::at_grad_set_enabled;

/// Guard during which this thread records graphs, or none. Dropping it restores the thread's mode, even if the work
/// has changed it or panics.
#[derive(Debug)]
#[must_use = "the mode is restored when the guard is dropped"]
pub struct GradMode {
    before: i32,
    /// The mode belongs to this thread.
    _thread: PhantomData<*const ()>,
}

impl GradMode {
    /// Sets whether this thread records graphs.
    pub fn set(recording: bool) -> Self {
        Self { before: swap(i32::from(recording)), _thread: PhantomData }
    }
}

impl Drop for GradMode {
    fn drop(&mut self) {
        swap(self.before);
    }
}

/// Sets the mode; returns the mode before.
fn swap(recording: i32) -> i32 {
    // SAFETY: takes and returns plain numbers; setting a thread's flag cannot fail.
    unsafe { at_grad_set_enabled(recording) }
}

#[cfg(test)]
mod tests {
    use std::panic;

    use tch::{Device, Kind, Tensor};

    use super::*;

    /// Returns whether operations build a graph now.
    fn is_traced() -> bool {
        let x = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        (x * 2.0).requires_grad()
    }

    #[test]
    fn work_begins_as_it_is_to_and_the_thread_is_as_before_afterwards() {
        for outside in [true, false] {
            let _outside = (!outside).then(tch::no_grad_guard);
            for wanted in [true, false] {
                let mode = GradMode::set(wanted);
                assert_eq!(is_traced(), wanted);
                std::mem::forget(tch::no_grad_guard());
                drop(mode);
                assert_eq!(is_traced(), outside, "a guard was forgotten");
                let panicked = panic::catch_unwind(|| {
                    let _mode = GradMode::set(wanted);
                    panic!("a layer")
                });
                assert!(panicked.is_err() && is_traced() == outside, "a panic");
            }
        }
    }
}
