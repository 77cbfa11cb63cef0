//! Limits that a memory cannot have.

use thiserror::Error;

use crate::bytes::Bytes;

/// A limit that a memory cannot have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A limit of nothing.
    #[error(
        "{memory} cannot have a limit of 0 bytes: give it at least what the model needs, or none"
    )]
    LimitOfZero {
        /// The arena's name, or the device's.
        memory: String,
    },
    /// A limit that is exceeded already.
    #[error(
        "{memory} cannot be limited to {limit}: {in_use} are in use; free tensors first or set the \
         limit to at least that"
    )]
    LimitBelowUse {
        /// The arena's name, or the device's.
        memory: String,
        /// The limit that was asked for.
        limit: Bytes,
        /// What is in use.
        in_use: Bytes,
    },
}
