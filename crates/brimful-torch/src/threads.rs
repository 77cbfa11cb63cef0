//! How many threads one operation may use, for this thread alone.

use std::marker::PhantomData;

/// Sets how many threads each operation started by this thread may use, until the guard is dropped.
pub fn limit_threads(count: usize) -> ThreadsGuard {
    let last = threads();
    set(count.max(1));
    ThreadsGuard { last, _this_thread: PhantomData }
}

/// How many threads an operation started by this thread may use.
pub fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

fn set(count: usize) {
    tch::set_num_threads(i32::try_from(count).unwrap_or(i32::MAX));
}

/// Keeps a thread count in place; dropped, the one before holds again.
#[derive(Debug)]
#[must_use = "the thread count goes back when the guard is dropped"]
pub struct ThreadsGuard {
    last: usize,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for ThreadsGuard {
    fn drop(&mut self) {
        set(self.last);
    }
}
