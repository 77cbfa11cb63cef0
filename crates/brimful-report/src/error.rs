//! Errors of reading run files.

use thiserror::Error;

/// Error for a file that cannot be read as a run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RunError {
    /// File that cannot be read.
    #[error("cannot read '{path}': {reason}")]
    Unreadable {
        /// Path of the file.
        path: String,
        /// Reason.
        reason: String,
    },
    /// File of another kind.
    #[error(
        "'{path}' is not a run file ({reason}): give it one that 'brimful train --record' has written"
    )]
    NotARun {
        /// Path of the file.
        path: String,
        /// Reason why it is not a run file.
        reason: String,
    },
    /// Run file of an unknown version.
    #[error(
        "'{path}' is a run file of version {found}, but this program reads version {known}: use the \
         brimful that wrote it, or record the run again"
    )]
    OtherVersion {
        /// Path of the file.
        path: String,
        /// Version of the file.
        found: u64,
        /// Version that this library reads.
        known: u64,
    },
    /// Run file with invalid contents.
    #[error("the run file '{path}' is damaged ({reason}): record the run again")]
    Damaged {
        /// Path of the file.
        path: String,
        /// Reason.
        reason: String,
    },
}
