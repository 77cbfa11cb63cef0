//! Gradient mode of a thread, set anew for each piece of work.
//!
//! libtorch keeps the mode for the whole thread. If it were not set anew, a guard that a layer or a closure
//! forgets to drop would affect all later work of the thread.

/// Runs `f` with or without autograd graphs. Restores the thread's mode afterwards, even if `f` changes it or
/// panics.
pub(crate) fn with_graphs<T>(wanted: bool, f: impl FnOnce() -> T) -> T {
    let _before = tch::no_grad_guard();
    if wanted { tch::with_grad(f) } else { f() }
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
                assert_eq!(with_graphs(wanted, is_traced), wanted);
                assert_eq!(is_traced(), outside);
                with_graphs(wanted, || std::mem::forget(tch::no_grad_guard()));
                assert_eq!(is_traced(), outside, "a guard was forgotten");
                let panicked = panic::catch_unwind(|| with_graphs(wanted, || panic!("a layer")));
                assert!(panicked.is_err() && is_traced() == outside, "a panic");
            }
        }
    }
}
