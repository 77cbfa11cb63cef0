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

    /// A layer without a whole name.
    #[error(
        "layer {position} cannot be named '{name}': its variables are saved under that name, so \
         give it one, without '.' at either end or two in a row"
    )]
    LayerName {
        /// Its place in the list, from 0.
        position: usize,
        /// The name.
        name: String,
    },

    /// Two layers of one name.
    #[error("layers {first} and {second} are both named '{name}': rename one of them")]
    LayerTwice {
        /// The name.
        name: String,
        /// The place of the first one, from 0.
        first: usize,
        /// The place of the second one.
        second: usize,
    },

    /// A layer whose name lies inside another's.
    #[error(
        "layer {second}, '{inner}', lies inside layer {first}, '{outer}', so that their variables \
         could have the same names: rename one of them"
    )]
    LayerInside {
        /// The shorter name.
        outer: String,
        /// Its place in the list, from 0.
        first: usize,
        /// The longer name.
        inner: String,
        /// Its place in the list.
        second: usize,
    },

    /// A layer that shares with one that is not there before it.
    #[error(
        "layer {position}, '{name}', shares the variables of '{owner}', which is not among the \
         layers before it: put that one first, or correct the name"
    )]
    LayerShares {
        /// Its place in the list, from 0.
        position: usize,
        /// Its name.
        name: String,
        /// The name of the layer that it would share with.
        owner: String,
    },

    /// A range that is not in the list.
    #[error("there are no layers {start} to {end}: the model has {len}")]
    LayerRange {
        /// The first layer asked for.
        start: usize,
        /// The end of the range.
        end: usize,
        /// How many layers there are.
        len: usize,
    },

    /// A layer whose building failed.
    #[error("layer '{layer}' could not be built: {message}")]
    LayerBuild {
        /// The layer's name.
        layer: String,
        /// What the panic said.
        message: String,
    },
}

impl From<brimful_torch::TorchError> for Error {
    fn from(error: brimful_torch::TorchError) -> Self {
        oom::from_torch(&error).map_or(Self::Torch(error.message), Self::OutOfMemory)
    }
}
