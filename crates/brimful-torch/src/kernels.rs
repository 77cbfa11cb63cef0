//! Kernels of our own: whether they are used, why not, and a switch.
//!
//! They are compiled for the card at hand when first used, by the compiler that comes with libtorch's
//! CUDA libraries, and kept in the user's cache. Where one cannot be had, libtorch's own operations run.

use std::ffi::CString;
use std::fmt;

use tch::Device;

use crate::error::{TorchError, take_string};
use crate::{cuda_object, device, ffi};

/// Whether a device's work runs in kernels of our own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// It does: what they are compiled for, and by what.
    Used(String),
    /// They are switched off, by [`set_enabled`] or the environment: `BRIMFUL_KERNELS` may be `on`, `1`, `true` or
    /// `yes`, or `off`, `0`, `false` or `no`, in whatever case; any other word turns them off too, and is told of by
    /// [`refusals`].
    Off,
    /// It cannot, for this reason: libtorch's own operations run.
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

/// What would be used on this device.
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

/// Whether kernels of our own are used where they can be, by all threads.
pub fn enabled() -> bool {
    // SAFETY: takes nothing.
    unsafe { ffi::brimful_kernels_enabled() }
}

/// Switches them on or off, for all threads. Work that was captured before stays as it is.
pub fn set_enabled(on: bool) {
    // SAFETY: takes a plain value.
    unsafe { ffi::brimful_kernels_enable(on) }
}

/// Why libtorch's own operations ran where a kernel of ours could have, since the last call; each
/// cause is told once.
pub fn refusals() -> Vec<String> {
    // SAFETY: gives null or a string that is ours.
    let text = take_string(unsafe { ffi::brimful_kernels_refusals() });
    text.iter().flat_map(|text| text.lines()).map(str::to_owned).collect()
}

/// Takes every card for a smaller one, with so many multiprocessors and so many bytes of shared memory
/// a block; nothing is the card's own. For tests.
///
/// # Errors
/// Where there is no CUDA.
pub fn pretend(multiprocessors: i32, shared_bytes: u64) -> Result<(), TorchError> {
    cuda_object::load()?;
    // SAFETY: takes plain values.
    unsafe { ffi::brimful_kernels_pretend(multiprocessors, shared_bytes) }
}

/// Lets one launch of a kernel of ours fail on this thread, after so many that do not; `None` takes that back. Tells
/// whether one was still to fail. For tests.
///
/// # Errors
/// Where there is no CUDA.
pub fn pretend_failure(after: Option<u32>) -> Result<bool, TorchError> {
    cuda_object::load()?;
    // SAFETY: takes a plain value.
    let left = unsafe { ffi::brimful_kernels_pretend_failure(after.map_or(-1, i64::from)) }?;
    Ok(left >= 0)
}

/// Lets so many loads of kernels onto a card fail, after so many others, with this number of the driver's errors: 2
/// where memory has run out. For tests.
///
/// # Errors
/// Where there is no CUDA.
pub fn fail_loads(after: i32, count: i32, error: i32) -> Result<(), TorchError> {
    cuda_object::load()?;
    // SAFETY: takes plain values.
    unsafe { ffi::brimful_kernels_fail_loads(after, count, error) }
}

/// A compiled kernel family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompiledKernel {
    /// Whether it came out of the cache.
    pub from_cache: bool,
    /// Its length.
    pub bytes: usize,
}

/// Compiles the kernels of a source file, such as `batch_norm.cu`, for an architecture such as 90, with
/// these words defined, or takes them out of the cache. It needs the compiler, but no card.
///
/// # Errors
/// Where NVRTC is not found, there is no such source, or it does not compile.
pub fn compile(
    source: &str,
    defines: &[&str],
    architecture: i32,
) -> Result<CompiledKernel, TorchError> {
    let (source, defines) = (text(source)?, text(&defines.join(" "))?);
    let mut compiled = CompiledKernel { from_cache: false, bytes: 0 };
    // SAFETY: both are texts that end in NUL; the places for the answers are valid.
    unsafe {
        let (from_cache, bytes) = (&mut compiled.from_cache, &mut compiled.bytes);
        let (source, defines) = (source.as_ptr(), defines.as_ptr());
        ffi::brimful_kernels_compile(source, defines, architecture, from_cache, bytes)
    }?;
    Ok(compiled)
}

/// Has them compiled on a thread beside, where the cache does not have them: [`compile`] waits for it.
///
/// # Errors
/// Where there is no such source. What else fails is [`compile`]'s to tell.
pub fn compile_ahead(source: &str, defines: &[&str], architecture: i32) -> Result<(), TorchError> {
    let (source, defines) = (text(source)?, text(&defines.join(" "))?);
    // SAFETY: both are texts that end in NUL, which are copied before the call returns.
    unsafe { ffi::brimful_kernels_compile_ahead(source.as_ptr(), defines.as_ptr(), architecture) }
}

fn text(text: &str) -> Result<CString, TorchError> {
    CString::new(text).map_err(|error| TorchError::other(error.to_string()))
}
