//! Everything that can go wrong, with the numbers and the remedy.

use tch::TchError;
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

    /// An option of an optimizer that makes no sense.
    #[error("{option} cannot be {value}: {remedy}")]
    BadOption {
        /// The option's name.
        option: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        remedy: &'static str,
    },

    /// A tensor that no optimizer can update.
    #[error("parameter '{parameter}' cannot be optimized: {reason}")]
    BadParameter {
        /// Its name.
        parameter: String,
        /// Why, and what to do.
        reason: String,
    },

    /// A parameter group without a parameter.
    #[error(
        "group '{group}' matches none of the {parameters} parameters (the first is '{first}'): \
         mend its condition or leave it out"
    )]
    EmptyGroup {
        /// The group's name.
        group: String,
        /// How many parameters there are.
        parameters: usize,
        /// The name of the first one.
        first: String,
    },

    /// A parameter group that cannot be made.
    #[error("group '{group}' cannot be made: {reason}")]
    BadGroup {
        /// The group's name.
        group: String,
        /// Why, and what to do.
        reason: String,
    },

    /// A parameter group that does not exist.
    #[error("there is no group '{group}'; there is {known}")]
    NoGroup {
        /// The name that was asked for.
        group: String,
        /// The names that there are.
        known: String,
    },

    /// A saved state that belongs to another model or optimizer.
    #[error(
        "the saved optimizer state does not fit: '{name}' is {saved} in it, but {here} here; load \
         the state that was saved with this model, optimizer and groups"
    )]
    StateMismatch {
        /// What differs: a parameter, one of its state's tensors, or a group.
        name: String,
        /// What the saved state has.
        saved: String,
        /// What the optimizer has.
        here: String,
    },

    /// Gradients were needed, and there are none.
    #[error("none of the {parameters} parameters has a gradient: run backward first")]
    NoGradient {
        /// How many parameters were looked at.
        parameters: usize,
    },

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

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        let text = match error {
            TchError::Torch(text) => text,
            other => other.to_string(),
        };
        // What follows the first line is a backtrace.
        let message = || text.lines().next().unwrap_or_default().to_owned();
        oom::recognise(&text).map_or_else(|| Self::Torch(message()), Self::OutOfMemory)
    }
}

impl From<brimful_torch::TorchError> for Error {
    fn from(error: brimful_torch::TorchError) -> Self {
        oom::from_torch(&error).map_or(Self::Torch(error.message), Self::OutOfMemory)
    }
}
