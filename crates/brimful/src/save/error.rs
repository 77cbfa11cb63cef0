//! Errors of reading and writing files.

use thiserror::Error;

/// Error of reading or writing a file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// File that cannot be read or written.
    #[error("cannot {action} '{path}': {reason}")]
    File {
        /// Attempt action: `read` or `write`.
        action: &'static str,
        /// Path of the file.
        path: String,
        /// Reason of the failure.
        reason: String,
    },
    /// File that does not contain complete tensors.
    #[error("'{path}' is damaged, or not a safetensors file: {reason}")]
    NotTensors {
        /// Path of the file.
        path: String,
        /// Reason.
        reason: String,
    },
}
