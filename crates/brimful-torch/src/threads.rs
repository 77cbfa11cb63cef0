//! Intra-op thread count of the current thread.

use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

use crate::replaced::{GuardNumber, Replaced};

thread_local! {
    static FOUND: Replaced<usize> = const { Replaced::new() };
}

/// Sets the number of threads that each operation of this thread may use, until the guard is dropped.
pub fn limit_threads(count: usize) -> ThreadsGuard {
    let number = Replaced::note(&FOUND, threads());
    set(count.max(1));
    ThreadsGuard(number)
}

/// Returns the number of threads that an operation of this thread may use.
pub fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// Sets the thread count of this thread only. libtorch's call also changes the default for threads that have not
/// read it yet. So a new thread reads the default before the call, and another new thread restores it afterwards.
/// If no thread can be started, there is no thread that could see the changed default.
fn set(count: usize) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let newcomers = elsewhere(tch::get_num_threads);
    tch::set_num_threads(i32::try_from(count).unwrap_or(i32::MAX));
    if let Some(newcomers) = newcomers {
        elsewhere(move || tch::set_num_threads(newcomers.max(1)));
    }
}

/// Runs `f` on a new thread; returns `None` if the system cannot start one.
fn elsewhere<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    Builder::new().spawn(f).ok()?.join().ok()
}

/// Keeps a thread count in place. Dropping the guard restores the previous count. Guards may be dropped in any
/// order: the innermost guard that is left stays in effect.
#[derive(Debug)]
#[must_use = "the thread count goes back when the guard is dropped"]
pub struct ThreadsGuard(GuardNumber);

impl Drop for ThreadsGuard {
    fn drop(&mut self) {
        if let Some(last) = Replaced::leave(&FOUND, self.0, |_, _| true) {
            set(last);
        }
    }
}
