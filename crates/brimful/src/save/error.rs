//! Files that cannot be read or written.

use thiserror::Error;

/// A file that cannot be read or written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// A file that cannot be read or written.
    #[error("cannot {action} '{path}': {reason}")]
    File {
        /// What was tried: `read` or `write`.
        action: &'static str,
        /// The file.
        path: String,
        /// Why not.
        reason: String,
    },
    /// A file that holds something else than whole tensors.
    #[error("'{path}' is damaged, or not a safetensors file: {reason}")]
    NotTensors {
        /// The file.
        path: String,
        /// What gave it away.
        reason: String,
    },
}
