//! Losses that no gradient of the mini-batch can be made of.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A loss that no gradient of the mini-batch can be made of.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum LossError {
    /// A loss that is not one number.
    #[error(
        "term {term} of the loss (counted from 0) has the shape {shape:?}: reduce it to one number, \
         by a mean or a sum"
    )]
    NotScalar {
        /// The term's place, counted from 0.
        term: usize,
        /// Its shape.
        shape: Vec<i64>,
    },
    /// A loss that no backward can start from.
    #[error(
        "the loss has no gradient: none of its {terms} terms depends on a trainable parameter, or they \
         were computed under no_grad or detached"
    )]
    WithoutGradient {
        /// How many there are.
        terms: usize,
    },
    /// A weight that is not one number.
    #[error(
        "the weight of term {term} of the loss (counted from 0) has the shape {shape:?}: sum it to \
         one number"
    )]
    WeightNotScalar {
        /// The term's place, counted from 0.
        term: usize,
        /// The weight's shape.
        shape: Vec<i64>,
    },
    /// Losses of another make in a later micro-batch.
    #[error(
        "a micro-batch's loss has {now} terms where the ones before had {before}, or of other \
         kinds: build the same loss for every micro-batch"
    )]
    TermsDiffer {
        /// Terms of the micro-batches before.
        before: usize,
        /// Terms of this one.
        now: usize,
    },
    /// Nothing to divide by.
    #[error(
        "the weights of term {term} of the loss (counted from 0) sum to 0 over the mini-batch: \
         there is nothing to take a mean over, so leave the mini-batch out"
    )]
    ZeroDenominator {
        /// The term's place, counted from 0.
        term: usize,
    },
    /// A loss that is infinite or no number.
    #[error(
        "term {term} of the loss (counted from 0) is {value} (weight {weight}) in micro-batch \
         {micro_batch}: nothing was changed; lower the learning rate or look at the data, use \
         `Loss::ratio` where a micro-batch may have a weight of 0, or allow it by `NonFinite::Allow`"
    )]
    NonFinite {
        /// The term's place, counted from 0.
        term: usize,
        /// The micro-batch, counted from 0.
        micro_batch: usize,
        /// The value.
        value: f64,
        /// Its weight.
        weight: f64,
    },
}

/// What of a step is infinite or no number.
#[derive(Debug, Clone, Copy, PartialEq, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum NonFiniteValue {
    /// A loss.
    #[error("the loss is {0}")]
    Loss(f64),
    /// A gradient.
    #[error("a gradient is infinite or no number")]
    Gradient,
}
