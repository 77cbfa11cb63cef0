//! Host allocator settings: retention of freed memory, and huge pages for large blocks.

use std::env;
use std::ffi::c_int;
#[cfg(target_os = "linux")]
use std::ffi::c_void;

use tch::{Device, Tensor};

/// `mallopt` settings of glibc, their values, and the environment variables that override them.
const SETTINGS: [(c_int, c_int, &str); 3] = [
    // Number of free bytes at the end of the heap above which they are returned to the system.
    (-1, c_int::MAX, "MALLOC_TRIM_THRESHOLD_"),
    // Size from which a block gets a mapping of its own.
    (-3, c_int::MAX, "MALLOC_MMAP_THRESHOLD_"),
    // Extra memory requested at a time: the size of a thread's whole heap, so that the heap never shrinks.
    (-2, 64 << 20, "MALLOC_TOP_PAD_"),
];

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    fn mallopt(setting: c_int, value: c_int) -> c_int;
    fn malloc_trim(kept: usize) -> c_int;
}

/// Keeps large freed blocks in the process for reuse. Otherwise they return to the system, which clears new pages
/// at their first write. That takes up to a fifth of the time of training on a CPU. Call it first thing in `main`.
/// Returns whether the settings took effect.
///
/// Applies to the whole process, whose memory then never shrinks below its peak. On threads other than the first it
/// applies only to blocks of less than 64 MiB. Settings from the environment and C libraries other than glibc are
/// left unchanged.
pub fn keep_freed_blocks() -> bool {
    let is_free = SETTINGS.iter().all(|(.., name)| env::var_os(name).is_none());
    is_free && SETTINGS.iter().all(|(setting, value, _)| set(*setting, *value))
}

#[cfg(target_env = "gnu")]
fn set(setting: c_int, value: c_int) -> bool {
    // SAFETY: takes plain numbers and may be called at any time.
    unsafe { mallopt(setting, value) == 1 }
}

/// Gives memory that the process has freed, but kept for reuse, back to the system; even memory between blocks in
/// use. Useful after a large one-time allocation; does nothing with a C library other than glibc.
pub fn give_freed_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes a plain number and may be called at any time.
    unsafe {
        malloc_trim(0);
    }
}

/// Size of a huge page on x86-64 and most ARM systems. A different size does no harm.
const LARGE_PAGE: usize = 2 << 20;

#[cfg(target_os = "linux")]
unsafe extern "C" {
    fn madvise(start: *mut c_void, length: usize, advice: c_int) -> c_int;
}

/// Asks the system for huge pages for a host tensor that has not been written to yet. Huge pages speed up
/// sequential access, the first write and pinning. Covers only huge pages that lie entirely within the tensor. If
/// the system has no free huge pages, it uses small ones.
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
    // SAFETY: the pages are all within the tensor's memory, and the advice (MADV_HUGEPAGE) does not change their
    // contents.
    unsafe {
        madvise(first as *mut c_void, length, 14);
    }
}

#[cfg(not(target_env = "gnu"))]
fn set(_: c_int, _: c_int) -> bool {
    false
}
