//! Everything that can go wrong, with the numbers and the remedy.

use thiserror::Error;

use crate::bytes::Bytes;
use crate::oom::{self, OutOfMemory};

/// What a call of this library can fail with.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Memory ran out.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),

    /// libtorch refused a call, in its own words.
    #[error("libtorch: {0}")]
    Torch(String),

    /// A limit of nothing.
    #[error(
        "arena '{arena}' cannot have a limit of 0 bytes: give it at least what the model needs, \
         or none"
    )]
    LimitOfZero {
        /// The arena's name.
        arena: String,
    },

    /// A limit that is exceeded already.
    #[error(
        "arena '{arena}' cannot be limited to {limit}: {in_use} are in use; free tensors first or \
         set the limit to at least that"
    )]
    LimitBelowUse {
        /// The arena's name.
        arena: String,
        /// The limit that was asked for.
        limit: Bytes,
        /// What is in use.
        in_use: Bytes,
    },

    /// A device that is not here.
    #[error("there is no device '{asked}' here; there is {available}{hint}")]
    NoDevice {
        /// The name that was asked for.
        asked: String,
        /// The names that there are.
        available: String,
        /// Why one may be missing, when that is known.
        hint: String,
    },

    /// A text that is not a number of bytes.
    #[error("'{text}' is not a number of bytes: write a number and a unit, such as 96MiB or 16 GB")]
    NotBytes {
        /// The text.
        text: String,
    },
}

impl From<brimful_torch::TorchError> for Error {
    fn from(error: brimful_torch::TorchError) -> Self {
        oom::from_torch(&error).map_or(Self::Torch(error.message), Self::OutOfMemory)
    }
}
