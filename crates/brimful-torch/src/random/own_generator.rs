//! Thread-local generator of CPU random numbers.

use std::marker::PhantomData;

use crate::ffi::{self, RawGenerator};

/// Guard that makes this thread's CPU tensors draw from a generator of their own.
///
/// libtorch has one CPU generator for all threads, so a thread's numbers depend on the other threads. With its
/// own generator they depend on the seed alone. Tensors on other devices, and calls that name a generator, draw
/// as before. Operations that draw nothing cost nothing extra.
#[derive(Debug)]
#[must_use = "the thread draws from the common generator again when the guard is dropped"]
pub struct OwnGenerator {
    own: *mut RawGenerator,
    _this_thread: PhantomData<*const ()>,
}

impl OwnGenerator {
    /// Creates a generator with seed 0. Dropping it restores the enclosing one.
    ///
    /// # Panics
    /// When memory for the generator's 3 KiB runs out.
    pub fn enter() -> Self {
        // SAFETY: on success `own` is a live generator of this thread, until it leaves in `drop`.
        let own = unsafe { ffi::brimful_own_generator_enter() }.expect("a generator takes 3 KiB");
        Self { own, _this_thread: PhantomData }
    }

    /// Restarts the generator with the sequence that `tch::manual_seed` gives for this seed.
    ///
    /// The work is done at the next draw: a seed without draws costs nothing. libtorch's CPU generator uses only
    /// the seed's lower 32 bits.
    pub fn seed(&self, seed: u64) {
        // SAFETY: the generator lives as long as `self`.
        unsafe { ffi::brimful_own_generator_seed(self.own, seed) }
    }
}

impl Drop for OwnGenerator {
    fn drop(&mut self) {
        // SAFETY: `own` was returned by `enter` on this thread, which the guard cannot leave. It is released only
        // here.
        unsafe { ffi::brimful_own_generator_leave(self.own) }
    }
}
