//! Files that are no run files, and why.

use thiserror::Error;

/// A file that cannot be read as a run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RunError {
    /// Something else.
    #[error(
        "'{path}' is not a run file ({reason}): give it one that 'brimful train --record' has written"
    )]
    NotARun {
        /// The file.
        path: String,
        /// What it lacks.
        reason: String,
    },
    /// Of a version that is not known here.
    #[error(
        "'{path}' is a run file of version {found}, but this program reads version {known}: use the \
         brimful that wrote it, or record the run again"
    )]
    OtherVersion {
        /// The file.
        path: String,
        /// Its version.
        found: u64,
        /// The version that is known.
        known: u64,
    },
    /// A run file that does not hold what it should.
    #[error("the run file '{path}' is damaged ({reason}): record the run again")]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
}
