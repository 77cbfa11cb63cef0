//! Version, location and vector instructions of the running libtorch.

use std::path::PathBuf;

use crate::error::take_string;
use crate::ffi;

/// Version of libtorch that brimful is built for.
pub const EXPECTED_VERSION: &str = "2.11.0";

/// Returns the version that the running libtorch reports.
pub fn version() -> Option<String> {
    // SAFETY: takes nothing and returns a string that the caller owns.
    let config = take_string(unsafe { ffi::brimful_show_config() })?;
    let (_, rest) = config.split_once("TORCH_VERSION=")?;
    Some(rest.split([',', ' ', '\n']).next()?.to_owned())
}

/// Ends the process with this exit code, without the destructors of libtorch's static objects. They take a third of
/// the time of a short run. Nothing that is buffered is written.
pub fn exit_at_once(code: u8) -> ! {
    // SAFETY: takes a number, and does not return.
    unsafe { ffi::_exit(i32::from(code)) }
}

/// Returns the file that the running libtorch was loaded from.
pub fn library_path() -> Option<PathBuf> {
    // SAFETY: takes nothing and returns null or a string that the caller owns.
    take_string(unsafe { ffi::brimful_library_path() }).map(PathBuf::from)
}

/// Returns the vector instructions that libtorch's CPU kernels use here, such as `AVX2`.
pub fn cpu_capability() -> Option<String> {
    // SAFETY: takes nothing and returns a string that the caller owns.
    take_string(unsafe { ffi::brimful_cpu_capability() })
}
