//! What went wrong inside libtorch: its kind and its message.

use std::ffi::{CStr, c_char};
use thiserror::Error;

use crate::ffi;

/// Why a libtorch call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// An allocator could not serve a request.
    OutOfMemory,
    /// Anything else.
    Other,
}

/// An error of libtorch, with its own message.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct TorchError {
    /// Whether memory ran out.
    pub kind: ErrorKind,
    /// libtorch's message, without its backtrace.
    pub message: String,
}

impl TorchError {
    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Other, message: message.into() }
    }
}

/// Calls a guarded function of the bridge and turns its outcome into a `Result`.
pub(crate) fn call(f: impl FnOnce(*mut *mut c_char) -> i32) -> Result<(), TorchError> {
    let mut message = std::ptr::null_mut();
    let kind = match f(&mut message) {
        0 => return Ok(()),
        1 => ErrorKind::OutOfMemory,
        _ => ErrorKind::Other,
    };
    Err(TorchError { kind, message: take_string(message).unwrap_or_default() })
}

/// Takes over a string that the bridge has allocated.
pub(crate) fn take_string(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the bridge gives null or a NUL-terminated string from strdup, which is ours to free.
    unsafe {
        let owned = CStr::from_ptr(text).to_string_lossy().into_owned();
        ffi::brimful_free_message(text);
        Some(owned)
    }
}
