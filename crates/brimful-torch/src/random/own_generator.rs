//! A generator for one thread alone.

use std::marker::PhantomData;

use crate::ffi::{self, RawGenerator};

/// While it lives, this thread's CPU tensors draw from a generator of their own.
///
/// libtorch has one CPU generator for all threads, so what a thread draws from it depends on what
/// the others do. From an own generator it depends on the seed alone. Tensors on other devices, and
/// calls that name a generator, draw as before. An operation that draws nothing costs nothing more.
#[derive(Debug)]
#[must_use = "the thread draws from the common generator again when the guard is dropped"]
pub struct OwnGenerator {
    own: *mut RawGenerator,
    _this_thread: PhantomData<*const ()>,
}

impl OwnGenerator {
    /// A new generator with the seed 0. Dropped, the one around it draws again.
    ///
    /// # Panics
    /// When there is no memory for the generator's 3 KiB.
    pub fn enter() -> Self {
        // SAFETY: on success `own` is a live generator of this thread, until it leaves in `drop`.
        let own = unsafe { ffi::brimful_own_generator_enter() }.expect("a generator takes 3 KiB");
        Self { own, _this_thread: PhantomData }
    }

    /// Starts again, with the numbers that `tch::manual_seed` gives for this seed.
    ///
    /// The work is done at the next draw: a seed that nothing is drawn from costs nothing.
    /// libtorch's CPU generator looks at the seed's lower 32 bits alone.
    pub fn seed(&self, seed: u64) {
        // SAFETY: the generator lives as long as `self`.
        unsafe { ffi::brimful_own_generator_seed(self.own, seed) }
    }
}

impl Drop for OwnGenerator {
    fn drop(&mut self) {
        // SAFETY: it was entered on this thread, which the guard cannot have left, and leaves once.
        unsafe { ffi::brimful_own_generator_leave(self.own) }
    }
}
