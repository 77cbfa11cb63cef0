//! How many threads one operation may use, for this thread alone.

use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

use crate::replaced::{GuardNumber, Replaced};

thread_local! {
    static FOUND: Replaced<usize> = const { Replaced::new() };
}

/// Sets how many threads each operation started by this thread may use, until the guard is dropped.
pub fn limit_threads(count: usize) -> ThreadsGuard {
    let number = Replaced::note(&FOUND, threads());
    set(count.max(1));
    ThreadsGuard(number)
}

/// How many threads an operation started by this thread may use.
pub fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// libtorch's own call also becomes the default of threads that have not asked yet. A newcomer
/// tells what that default was, and another one puts it back; where none can be started, nobody has that default.
fn set(count: usize) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let newcomers = elsewhere(tch::get_num_threads);
    tch::set_num_threads(i32::try_from(count).unwrap_or(i32::MAX));
    if let Some(newcomers) = newcomers {
        elsewhere(move || tch::set_num_threads(newcomers.max(1)));
    }
}

/// On a thread of its own; nothing where the system has none to give.
fn elsewhere<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    Builder::new().spawn(f).ok()?.join().ok()
}

/// Keeps a thread count in place; dropped, the one before holds again. Guards may be dropped in any
/// order: the innermost that is left holds.
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
