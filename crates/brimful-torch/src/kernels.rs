//! Custom CUDA kernels: their state, the reasons for fallbacks, and a switch.
//!
//! Kernels are compiled for the GPU in use at the first launch, by the compiler that comes with libtorch's CUDA
//! libraries, and cached in the user's cache folder. If a kernel is not available, libtorch's own operations run
//! instead.

use std::ffi::CString;
use std::fmt;

use tch::Device;

use crate::error::{TorchError, take_string};
use crate::{cuda_object, device, ffi};

/// State of the custom kernels on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// In use: the target architecture and the compiler.
    Used(String),
    /// Switched off by [`set_enabled`] or the environment. `BRIMFUL_KERNELS` may be `on`, `1`, `true` or `yes`,
    /// or `off`, `0`, `false` or `no`, in upper or lower case. Any other word also switches them off, and
    /// [`refusals`] reports it.
    Off,
    /// Unavailable for this reason: libtorch's own operations run.
    Unavailable(String),
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Used(how) => write!(f, "kernels of our own ({how})"),
            Self::Off => f.write_str("libtorch's kernels: our own are switched off"),
            Self::Unavailable(why) => write!(f, "libtorch's kernels: {why}"),
        }
    }
}

/// Returns the state of the custom kernels on this device.
pub fn state(on: Device) -> State {
    if !enabled() {
        return State::Off;
    }
    match describe(on) {
        Ok(how) => State::Used(how),
        Err(error) => State::Unavailable(error.message),
    }
}

fn describe(on: Device) -> Result<String, TorchError> {
    if on == Device::Cpu {
        return Err(TorchError::other("kernels are for CUDA"));
    }
    let number = device::number(on)?;
    cuda_object::load()?;
    // SAFETY: takes a plain number.
    let how = unsafe { ffi::brimful_kernels_describe(number) }?;
    Ok(take_string(how).unwrap_or_default())
}

/// Returns whether all threads use custom kernels where available.
pub fn enabled() -> bool {
    // SAFETY: takes nothing.
    unsafe { ffi::brimful_kernels_enabled() }
}

/// Switches the custom kernels on or off for all threads. Captured graphs keep the kernels that they were captured
/// with.
pub fn set_enabled(on: bool) {
    // SAFETY: takes a plain value.
    unsafe { ffi::brimful_kernels_enable(on) }
}

/// Returns the reasons, since the last call, why libtorch's operations ran instead of a custom kernel. Each cause
/// is reported once.
pub fn refusals() -> Vec<String> {
    // SAFETY: returns null or a string that the caller owns.
    let text = take_string(unsafe { ffi::brimful_kernels_refusals() });
    text.iter().flat_map(|text| text.lines()).map(str::to_owned).collect()
}

/// Treats every GPU as one with this many multiprocessors and bytes of shared memory per block. For tests.
///
/// # Errors
/// When there is no CUDA.
pub fn pretend(multiprocessors: i32, shared_bytes: u64) -> Result<(), TorchError> {
    cuda_object::load()?;
    // SAFETY: takes plain values.
    unsafe { ffi::brimful_kernels_pretend(multiprocessors, shared_bytes) }
}

/// Makes one kernel launch on this thread fail, after `after` successful ones; `None` cancels this. Returns
/// whether an earlier request was still pending. For tests.
///
/// # Errors
/// When there is no CUDA.
pub fn pretend_failure(after: Option<u32>) -> Result<bool, TorchError> {
    cuda_object::load()?;
    // SAFETY: takes a plain value.
    let left = unsafe { ffi::brimful_kernels_pretend_failure(after.map_or(-1, i64::from)) }?;
    Ok(left >= 0)
}

/// Makes `count` kernel loads onto a GPU fail, after `after` others, with this driver error number: 2 is out of
/// memory. For tests.
///
/// # Errors
/// When there is no CUDA.
pub fn fail_loads(after: i32, count: i32, error: i32) -> Result<(), TorchError> {
    cuda_object::load()?;
    // SAFETY: takes plain values.
    unsafe { ffi::brimful_kernels_fail_loads(after, count, error) }
}

/// Compiled kernel family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompiledKernel {
    /// True if it came from the cache.
    pub from_cache: bool,
    /// Length in bytes.
    pub bytes: usize,
}

/// Compiles the kernels of a source file, such as `batch_norm.cu`, for an architecture such as 90 with these
/// defines, or reads them from the cache. Needs the compiler, but no GPU.
///
/// # Errors
/// When NVRTC is not found, the source does not exist, or it does not compile.
pub fn compile(
    source: &str,
    defines: &[&str],
    architecture: i32,
) -> Result<CompiledKernel, TorchError> {
    let (source, defines) = (text(source)?, text(&defines.join(" "))?);
    let mut compiled = CompiledKernel { from_cache: false, bytes: 0 };
    // SAFETY: `source` and `defines` end in NUL. They and the out-pointers are valid during the call.
    unsafe {
        let (from_cache, bytes) = (&mut compiled.from_cache, &mut compiled.bytes);
        let (source, defines) = (source.as_ptr(), defines.as_ptr());
        ffi::brimful_kernels_compile(source, defines, architecture, from_cache, bytes)
    }?;
    Ok(compiled)
}

/// Compiles the kernels of a source file as [`compile`], but on a background thread and only if they are not
/// cached. A later [`compile`] waits for the thread.
///
/// # Errors
/// When the source does not exist. [`compile`] reports any other failure.
pub fn compile_ahead(source: &str, defines: &[&str], architecture: i32) -> Result<(), TorchError> {
    let (source, defines) = (text(source)?, text(&defines.join(" "))?);
    // SAFETY: `source` and `defines` end in NUL, and are copied before the call returns.
    unsafe { ffi::brimful_kernels_compile_ahead(source.as_ptr(), defines.as_ptr(), architecture) }
}

fn text(text: &str) -> Result<CString, TorchError> {
    CString::new(text).map_err(|error| TorchError::other(error.to_string()))
}
