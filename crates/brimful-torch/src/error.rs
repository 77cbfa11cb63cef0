//! Errors of libtorch: kind and message.

use std::ffi::{CStr, c_char};
use thiserror::Error;

use crate::ffi;

/// Cause of a failed libtorch call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// An allocator could not serve a request.
    OutOfMemory,
    /// Any other error.
    Other,
}

/// Error of libtorch, with its message.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct TorchError {
    /// Kind of failure: out of memory or other.
    pub kind: ErrorKind,
    /// libtorch's message, without its backtrace.
    pub message: String,
}

impl TorchError {
    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Other, message: message.into() }
    }
}

/// Calls a guarded function of the bridge and converts its status code into a `Result`.
pub(crate) fn call(f: impl FnOnce(*mut *mut c_char) -> i32) -> Result<(), TorchError> {
    let mut message = std::ptr::null_mut();
    let kind = match f(&mut message) {
        0 => return Ok(()),
        1 => ErrorKind::OutOfMemory,
        _ => ErrorKind::Other,
    };
    Err(TorchError { kind, message: take_string(message).unwrap_or_default() })
}

/// Takes ownership of a string that the bridge allocated.
pub(crate) fn take_string(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the bridge returns null or a NUL-terminated string from strdup, which the caller frees.
    unsafe {
        let owned = CStr::from_ptr(text).to_string_lossy().into_owned();
        ffi::brimful_free_message(text);
        Some(owned)
    }
}
