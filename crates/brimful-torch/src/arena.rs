//! Memory accounting for CPU tensors: current use, peak and a limit.

use std::ffi::CString;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::error::take_string;
use crate::ffi::{self, RawArena, RawStay};

/// Arena: an account that CPU allocations are charged to. Clones share one arena.
///
/// A block stays charged to its arena until it is freed, whichever thread frees it. The first arena installs the
/// accounting allocator in libtorch; dropping the last arena removes the allocator.
#[derive(Debug, Clone)]
pub struct Account(Arc<Handle>);

#[derive(Debug)]
struct Handle(*mut RawArena);

// SAFETY: the C++ arena consists of atomics and an immutable name, so any thread may use or drop it.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle holds one reference to the arena, and releases it only here. Living blocks hold
        // references of their own.
        unsafe { ffi::brimful_arena_drop(self.0) }
    }
}

impl Account {
    /// Creates an arena without a limit. The name appears in out-of-memory messages.
    pub fn new(name: &str) -> Self {
        let name: String = name.chars().filter(|c| !c.is_control()).collect();
        let name = CString::new(name).expect("control characters, NUL among them, were removed");
        // SAFETY: `name` is valid during the call, which copies it. The handle owns the new arena.
        Self(Arc::new(Handle(unsafe { ffi::brimful_arena_new(name.as_ptr()) })))
    }

    /// Charges this thread's CPU allocations to the arena until the guard is dropped.
    pub fn enter(&self) -> ArenaGuard {
        // SAFETY: the arena is valid until the guard leaves it, because the guard holds a clone of the account.
        let stay = unsafe { ffi::brimful_arena_enter(self.0.0) };
        ArenaGuard { _account: self.clone(), stay, _this_thread: PhantomData }
    }

    /// Sets the limit to this many bytes from now on; `None` removes it.
    pub fn set_limit(&self, bytes: Option<u64>) {
        let limit = bytes.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_set_limit(self.0.0, limit) }
    }

    /// Returns the limit in bytes, if any.
    pub fn limit(&self) -> Option<u64> {
        // SAFETY: the arena lives as long as `self`.
        u64::try_from(unsafe { ffi::brimful_arena_limit(self.0.0) }).ok()
    }

    /// Returns the bytes in use now.
    pub fn current(&self) -> u64 {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_current(self.0.0) }.unsigned_abs()
    }

    /// Returns the most bytes in use since the arena was created or its peak was reset.
    pub fn peak(&self) -> u64 {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_peak(self.0.0) }.unsigned_abs()
    }

    /// Resets the peak to the bytes in use now.
    pub fn reset_peak(&self) {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_reset_peak(self.0.0) }
    }

    /// Returns the number of allocations requested, including refused ones.
    pub fn allocations(&self) -> u64 {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_allocations(self.0.0) }.unsigned_abs()
    }

    /// Returns the number of refused allocations.
    pub fn refusals(&self) -> u64 {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_refusals(self.0.0) }.unsigned_abs()
    }

    /// Makes `count` allocations in a row fail as if memory had run out, starting with the n-th from now (1 is
    /// the next one); a count of 0 cancels this. For tests.
    pub fn fail_allocations(&self, n: u64, count: u64) {
        // Each number is at most a quarter of the range, so that the bridge can add both to its own counter
        // without overflow.
        let bounded = |number| i64::try_from(number).unwrap_or(i64::MAX).min(i64::MAX / 4);
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_fail(self.0.0, bounded(n), bounded(count)) }
    }
}

/// Allocation that was refused, with its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedAllocation {
    /// The arena's name.
    pub arena: String,
    /// Bytes requested.
    pub asked: u64,
    /// Bytes in use at the time of the request.
    pub in_use: u64,
    /// Limit that was exceeded; none if [`Account::fail_allocations`] caused the refusal.
    pub limit: Option<u64>,
}

/// Returns the recently refused allocation of this process that the text of an error or panic reports. tch passes
/// on only the text of a C++ exception, so the numbers of the refusal are looked up by its text.
pub fn refusal_told_in(text: &str) -> Option<RefusedAllocation> {
    let text = CString::new(text).ok()?;
    let mut numbers = [0; 3];
    // SAFETY: `text` ends in NUL, and `numbers` has room for three numbers. Both are valid during the call.
    let arena = take_string(unsafe { ffi::brimful_arena_refusal(text.as_ptr(), &mut numbers) })?;
    // In the order of bridge/refusals.cpp.
    let [asked, in_use, limit] = numbers;
    Some(RefusedAllocation {
        arena,
        asked: asked.unsigned_abs(),
        in_use: in_use.unsigned_abs(),
        limit: u64::try_from(limit).ok(),
    })
}

/// Charges this thread's allocations to the arena that it was created for. After the guard is dropped, they are
/// charged to the innermost arena that the thread is still in. Guards may be dropped in any order.
#[derive(Debug)]
#[must_use = "the arena is left when the guard is dropped"]
pub struct ArenaGuard {
    _account: Account,
    stay: *mut RawStay,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for ArenaGuard {
    fn drop(&mut self) {
        // SAFETY: `stay` was returned by `enter` on this thread, which the guard cannot leave. It is released only
        // here.
        unsafe { ffi::brimful_arena_leave(self.stay) };
    }
}
