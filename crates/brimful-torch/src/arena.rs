//! A memory account for CPU tensors: what is in use, the most there ever was, and a limit.

use std::ffi::CString;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::error::take_string;
use crate::ffi::{self, RawArena, RawStay};

/// An account that CPU allocations are charged to. Clones share it.
///
/// A block stays charged to the arena that allocated it until it is freed, on whatever thread.
/// While no arena exists libtorch's own allocator is in place; the first one puts the accounting
/// allocator before it, the last one dropped takes it away again.
#[derive(Debug, Clone)]
pub struct Account(Arc<Handle>);

#[derive(Debug)]
struct Handle(*mut RawArena);

// SAFETY: the C++ arena is atomics and an immutable name; any thread may use and drop it.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle holds one reference, given back exactly once. Blocks hold their own.
        unsafe { ffi::brimful_arena_drop(self.0) }
    }
}

impl Account {
    /// A new arena without a limit. The name appears in out-of-memory messages.
    pub fn new(name: &str) -> Self {
        let name: String = name.chars().filter(|c| !c.is_control()).collect();
        let name = CString::new(name).expect("control characters, NUL among them, were removed");
        // SAFETY: the bridge copies the name and returns a live arena.
        Self(Arc::new(Handle(unsafe { ffi::brimful_arena_new(name.as_ptr()) })))
    }

    /// Charges this thread's CPU allocations to the arena until the guard is dropped.
    pub fn enter(&self) -> ArenaGuard {
        // SAFETY: the guard holds a clone of the arena until it has left it.
        let stay = unsafe { ffi::brimful_arena_enter(self.0.0) };
        ArenaGuard { _account: self.clone(), stay, _this_thread: PhantomData }
    }

    /// Allows at most so many bytes from now on; `None` lifts the limit.
    pub fn set_limit(&self, bytes: Option<u64>) {
        let limit = bytes.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_set_limit(self.0.0, limit) }
    }

    /// The limit in bytes, if there is one.
    pub fn limit(&self) -> Option<u64> {
        // SAFETY: the arena lives as long as `self`.
        u64::try_from(unsafe { ffi::brimful_arena_limit(self.0.0) }).ok()
    }

    /// Bytes in use now.
    pub fn current(&self) -> u64 {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_current(self.0.0) }.unsigned_abs()
    }

    /// The most bytes in use since the arena was made or its peak was reset.
    pub fn peak(&self) -> u64 {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_peak(self.0.0) }.unsigned_abs()
    }

    /// Lets the peak start again from what is in use now.
    pub fn reset_peak(&self) {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_reset_peak(self.0.0) }
    }

    /// How many allocations the arena has been asked for, refused ones included.
    pub fn allocations(&self) -> u64 {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_allocations(self.0.0) }.unsigned_abs()
    }

    /// How many allocations were refused.
    pub fn refusals(&self) -> u64 {
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_refusals(self.0.0) }.unsigned_abs()
    }

    /// Makes the n-th allocation from now (1 is the next one) and those after it fail, `count` in
    /// all, as if memory had run out; a count of 0 calls it off. For tests.
    pub fn fail_allocations(&self, n: u64, count: u64) {
        // Halved twice, so that the bridge can add the two to a number of its own.
        let bounded = |number| i64::try_from(number).unwrap_or(i64::MAX).min(i64::MAX / 4);
        // SAFETY: the arena lives as long as `self`.
        unsafe { ffi::brimful_arena_fail(self.0.0, bounded(n), bounded(count)) }
    }
}

/// An allocation that was refused, with its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedAllocation {
    /// The arena's name.
    pub arena: String,
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes in use when they were asked for.
    pub in_use: u64,
    /// The limit that stood in the way; none where [`Account::fail_allocations`] did.
    pub limit: Option<u64>,
}

/// The refusal that an error's or a panic's text tells of, among the last ones of this process. tch
/// hands on an exception's text alone, so this is how its numbers come along.
pub fn refusal_told_in(text: &str) -> Option<RefusedAllocation> {
    let text = CString::new(text).ok()?;
    let mut numbers = [0; 3];
    // SAFETY: the text ends in NUL, and there is room for the numbers.
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

/// Charges the thread that entered an arena to it, or to those entered since; dropped, to the
/// innermost that is left. Guards may be dropped in any order.
#[derive(Debug)]
#[must_use = "the arena is left when the guard is dropped"]
pub struct ArenaGuard {
    _account: Account,
    stay: *mut RawStay,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for ArenaGuard {
    fn drop(&mut self) {
        // SAFETY: it was entered on this thread, which the guard cannot have left, and leaves once.
        unsafe { ffi::brimful_arena_leave(self.stay) };
    }
}
