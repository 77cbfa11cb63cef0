//! Errors of memory limits.

use thiserror::Error;

use brimful_plan::bytes::Bytes;

/// Error of a memory limit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Limit of 0.
    #[error(
        "{memory} cannot have a limit of 0 bytes: give it at least what the model needs, or none"
    )]
    LimitOfZero {
        /// Name of the arena or the device.
        memory: String,
    },
    /// Limit below the bytes in use.
    #[error(
        "{memory} cannot be limited to {limit}: {in_use} are in use; free tensors first or set the \
         limit to at least that"
    )]
    LimitBelowUse {
        /// Name of the arena or the device.
        memory: String,
        /// Requested limit.
        limit: Bytes,
        /// Bytes in use.
        in_use: Bytes,
    },
}
