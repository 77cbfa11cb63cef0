//! Errors of reading and writing folders of weights.

use thiserror::Error;

use super::config::MODEL_TYPES;

/// A folder of weights that cannot be read or written as asked.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PretrainedError {
    /// A file that cannot be read or written.
    #[error("cannot {action} '{path}': {reason}")]
    File {
        /// The attempted action: `read` or `write`.
        action: &'static str,
        /// Path of the file.
        path: String,
        /// Reason of the failure.
        reason: String,
    },
    /// An unsupported type of model.
    #[error(
        "'{path}' has the model type '{found}': supported are {}",
        MODEL_TYPES.join(", ")
    )]
    ModelType {
        /// Path of the file.
        path: String,
        /// The type in the file.
        found: String,
    },
    /// A field that is missing or has an invalid value.
    #[error("'{path}': {field} {reason}")]
    Field {
        /// Path of the file.
        path: String,
        /// Name of the field.
        field: String,
        /// Problem with the field.
        reason: String,
    },
    /// Files of weights that the index names, but that are missing.
    #[error("'{folder}' lacks {} of the {named} files that its index names: {}: copy them there",
        missing.len(), missing.join(", "))]
    Shards {
        /// Path of the folder.
        folder: String,
        /// Number of files that the index names.
        named: usize,
        /// Names of the missing files.
        missing: Vec<String>,
    },
    /// Weights that differ from those of the model that the config describes.
    #[error("the weights of '{folder}' are not those of its config.json: {}", shown(differences))]
    Tensors {
        /// Path of the folder.
        folder: String,
        /// Differences, one per tensor.
        differences: Vec<String>,
    },
    /// Weights that differ from those of the adapter that its config describes for this model.
    #[error(
        "the weights of '{folder}' do not match its adapter_config.json and this model: {}: give the model \
         that the adapter was trained with",
        shown(differences)
    )]
    Adapter {
        /// Path of the folder.
        folder: String,
        /// Differences, one per tensor.
        differences: Vec<String>,
    },
    /// A folder that holds something else.
    #[error(
        "'{folder}' holds {other}, which would be lost: name a new folder, or one that was saved before"
    )]
    Occupied {
        /// Path of the folder.
        folder: String,
        /// Name of a file that would be lost.
        other: String,
    },
    /// An error of the library.
    #[error(transparent)]
    Brimful(#[from] brimful::Error),
}

/// Number of differences listed.
const SHOWN: usize = 4;

fn shown(differences: &[String]) -> String {
    let first = differences[..differences.len().min(SHOWN)].join("; ");
    match differences.len().saturating_sub(SHOWN) {
        0 => first,
        more => format!("{first}; and {more} more"),
    }
}
