//! Why a folder of weights cannot be read or written.

use thiserror::Error;

use super::config::MODEL_TYPES;

/// A folder of weights that cannot be read or written as asked.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PretrainedError {
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
    /// A model of a kind that is not known here.
    #[error("'{path}' tells of a model of the type '{found}': those known are {}", MODEL_TYPES.join(", "))]
    ModelType {
        /// The file.
        path: String,
        /// What it says.
        found: String,
    },
    /// A number or word that is missing, or says what cannot be.
    #[error("'{path}': {field} {reason}")]
    Field {
        /// The file.
        path: String,
        /// Its name.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Files of weights that are named and not there.
    #[error("'{folder}' lacks {} of the {named} files that its index names: {}: copy them there",
        missing.len(), missing.join(", "))]
    Shards {
        /// The folder.
        folder: String,
        /// How many files the index names.
        named: usize,
        /// Those that are not there.
        missing: Vec<String>,
    },
    /// Weights that are not those of the model that the config tells of.
    #[error("the weights of '{folder}' are not those of its config.json: {}", shown(differences))]
    Tensors {
        /// The folder.
        folder: String,
        /// What differs, a tensor each.
        differences: Vec<String>,
    },
    /// Weights that are not those of the adapter that its config tells of, beside this model.
    #[error(
        "the weights of '{folder}' are not those of its adapter_config.json beside this model: {}: give the model that \
         it was trained with",
        shown(differences)
    )]
    Adapter {
        /// The folder.
        folder: String,
        /// Differences, a tensor each.
        differences: Vec<String>,
    },
    /// A folder that holds something else.
    #[error(
        "'{folder}' holds {other}, which would be lost: name a folder that is new, or was saved before"
    )]
    Occupied {
        /// The folder.
        folder: String,
        /// What would be lost.
        other: String,
    },
    /// What the library says.
    #[error(transparent)]
    Brimful(#[from] brimful::Error),
}

/// How many differences are told.
const SHOWN: usize = 4;

fn shown(differences: &[String]) -> String {
    let first = differences[..differences.len().min(SHOWN)].join("; ");
    match differences.len().saturating_sub(SHOWN) {
        0 => first,
        more => format!("{first}; and {more} more"),
    }
}
