//! The host's allocator: what becomes of memory that is freed, and in which pages large blocks lie.

use std::env;
use std::ffi::c_int;
#[cfg(target_os = "linux")]
use std::ffi::c_void;

use tch::{Device, Tensor};

/// What glibc's `mallopt` sets, to what, and the variable that sets it from outside.
const SETTINGS: [(c_int, c_int, &str); 3] = [
    // Free memory at the heap's end that goes back to the system.
    (-1, c_int::MAX, "MALLOC_TRIM_THRESHOLD_"),
    // The size from which blocks have a mapping of their own.
    (-3, c_int::MAX, "MALLOC_MMAP_THRESHOLD_"),
    // Memory that is taken beyond what is needed: a whole heap of a thread, which then stays.
    (-2, 64 << 20, "MALLOC_TOP_PAD_"),
];

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    fn mallopt(setting: c_int, value: c_int) -> c_int;
    fn malloc_trim(kept: usize) -> c_int;
}

/// Lets the process keep large blocks that it frees, for the next ones. Otherwise they go back to the
/// system, which clears them, page by page, when the next tensor is written: in training on a CPU up
/// to a fifth of the time. Call it first thing in `main`. Tells whether it does so.
///
/// It holds for the whole process, which then never has less memory than at its peak; on other
/// threads than the first one, for blocks of less than 64 MiB. A setting that the environment makes is
/// left as it is, and so is another C library than glibc.
pub fn keep_freed_blocks() -> bool {
    let is_free = SETTINGS.iter().all(|(.., name)| env::var_os(name).is_none());
    is_free && SETTINGS.iter().all(|(setting, value, _)| set(*setting, *value))
}

#[cfg(target_env = "gnu")]
fn set(setting: c_int, value: c_int) -> bool {
    // SAFETY: it takes plain numbers, and may be called at any time.
    unsafe { mallopt(setting, value) == 1 }
}

/// Gives what the process has freed and kept back to the system, wherever it lies between what is in use. For
/// those who have made and freed much that does not come again; another C library than glibc is left alone.
pub fn give_freed_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes a plain number, and may be called at any time.
    unsafe {
        malloc_trim(0);
    }
}

/// The size of a large page on x86-64 and on most ARM systems; where it is another, nothing is lost.
const LARGE_PAGE: usize = 2 << 20;

#[cfg(target_os = "linux")]
unsafe extern "C" {
    fn madvise(start: *mut c_void, length: usize, advice: c_int) -> c_int;
}

/// Asks the system for large pages behind a tensor in the host's memory that nobody has written to yet: one
/// that is read and written from end to end is so faster, and so are its first write and a lock on it. Only the
/// large pages that lie whole within the tensor; a system that has none to give goes on with small ones.
pub fn prefer_large_pages(tensor: &Tensor) {
    if tensor.device() != Device::Cpu || !tensor.defined() {
        return;
    }
    let start = tensor.data_ptr() as usize;
    let first = start.next_multiple_of(LARGE_PAGE);
    let end = start + tensor.numel() * tensor.kind().elt_size_in_bytes();
    let length = (end / LARGE_PAGE * LARGE_PAGE).saturating_sub(first);
    if start == 0 || length == 0 {
        return;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the pages are all within the tensor's memory, and the advice (MADV_HUGEPAGE) leaves what is in
    // them as it is.
    unsafe {
        madvise(first as *mut c_void, length, 14);
    }
}

#[cfg(not(target_env = "gnu"))]
fn set(_: c_int, _: c_int) -> bool {
    false
}
