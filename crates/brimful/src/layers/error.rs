//! Errors of listing, building and running layers.

use thiserror::Error;

/// Layers that cannot be listed, built or run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayersError {
    /// A layer whose name is missing or has an empty component.
    #[error(
        "layer {position} cannot be named '{name}', because its variables are saved under that name: give it a \
         name that is not empty, neither begins nor ends with '.', and does not contain '..'"
    )]
    Name {
        /// Its position in the list, counted from 0.
        position: usize,
        /// The name.
        name: String,
    },
    /// Two layers of one name.
    #[error("layers {first} and {second} are both named '{name}': rename one of them")]
    Twice {
        /// The name.
        name: String,
        /// Position of the first one, counted from 0.
        first: usize,
        /// Position of the second one.
        second: usize,
    },
    /// A layer whose name lies inside another's.
    #[error(
        "layer {second}, '{inner}', lies inside layer {first}, '{outer}', so that their variables \
         could have the same names: rename one of them"
    )]
    Inside {
        /// The shorter name.
        outer: String,
        /// Its position in the list, counted from 0.
        first: usize,
        /// The longer name.
        inner: String,
        /// Its position in the list.
        second: usize,
    },
    /// A layer that shares with one that is not before it.
    #[error(
        "layer {position}, '{name}', shares the variables of '{owner}', which is not among the layers \
         before it: put '{owner}' first, or correct the name"
    )]
    Shares {
        /// Its position in the list, counted from 0.
        position: usize,
        /// Its name.
        name: String,
        /// Name of the layer that it would share with.
        owner: String,
    },
    /// A layer with more than one exact BatchNorm.
    #[error(
        "layer {position}, '{name}', has {norms} exact BatchNorms, but all micro-batches can wait before a stage \
         only once: add each as its own layer, with `add_norm`"
    )]
    ExactNorms {
        /// Its position in the list, counted from 0.
        position: usize,
        /// Its name.
        name: String,
        /// Number of its exact BatchNorms.
        norms: usize,
    },
    /// A pop without a stash.
    #[error(
        "layer {position}, '{name}', pops '{skip}', which is stashed neither in its own list nor in an \
         enclosing list: add `.stash(\"{skip}\")` before the layer"
    )]
    SkipUnknown {
        /// The layer's position in the list, counted from 0.
        position: usize,
        /// The layer's name.
        name: String,
        /// Name of the skip that it pops.
        skip: String,
    },
    /// A pop that comes before its stash.
    #[error(
        "layer {position}, '{name}', pops '{skip}', which is stashed only later, by layer {stash}: \
         move the stash before it"
    )]
    SkipTooEarly {
        /// The layer's position in the list, counted from 0.
        position: usize,
        /// The layer's name.
        name: String,
        /// Name of the skip that it pops.
        skip: String,
        /// Position of the stash.
        stash: usize,
    },
    /// A stash that no layer pops.
    #[error("layer {position} stashes '{skip}', which no layer pops: pop it, or remove it")]
    SkipUnused {
        /// The stash's position in the list, counted from 0.
        position: usize,
        /// Its name.
        skip: String,
    },
    /// A range outside the list.
    #[error("there are no layers {start} to {end}: the model has {len}")]
    Range {
        /// First layer of the range.
        start: usize,
        /// End of the range.
        end: usize,
        /// Number of layers.
        len: usize,
    },
    /// A layer whose builder failed.
    #[error("layer '{layer}' could not be built: {message}")]
    Build {
        /// The layer's name.
        layer: String,
        /// Message of the panic.
        message: String,
    },
    /// A layer whose forward failed.
    #[error("layer '{layer}' could not be run on an input of shape {shape:?}: {message}")]
    Run {
        /// The layer's name.
        layer: String,
        /// The shape of its input.
        shape: Vec<i64>,
        /// Message of the panic.
        message: String,
    },
}
