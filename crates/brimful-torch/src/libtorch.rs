//! Which libtorch is running: its version, its place, and the vector instructions it uses.

use std::path::PathBuf;

use crate::error::take_string;
use crate::ffi;

/// The version that brimful is built for.
pub const EXPECTED_VERSION: &str = "2.11.0";

/// The version of the libtorch that is running, as it says itself.
pub fn version() -> Option<String> {
    // SAFETY: takes nothing and gives a string that is ours.
    let config = take_string(unsafe { ffi::brimful_show_config() })?;
    let (_, rest) = config.split_once("TORCH_VERSION=")?;
    Some(rest.split([',', ' ', '\n']).next()?.to_owned())
}

/// The file that the running libtorch was loaded from.
pub fn library_path() -> Option<PathBuf> {
    // SAFETY: takes nothing and gives null or a string that is ours.
    take_string(unsafe { ffi::brimful_library_path() }).map(PathBuf::from)
}

/// The vector instructions that libtorch's CPU kernels use here, such as `AVX2`.
pub fn cpu_capability() -> Option<String> {
    // SAFETY: takes nothing and gives a string that is ours.
    take_string(unsafe { ffi::brimful_cpu_capability() })
}
