//! Errors of losses from which no gradient can be computed.

use thiserror::Error;

/// A loss from which no gradient of the mini-batch can be computed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum LossError {
    /// A loss that is not a scalar.
    #[error(
        "term {term} of the loss (counted from 0) has the shape {shape:?}: reduce it to one number, \
         by a mean or a sum"
    )]
    NotScalar {
        /// The term's index, counted from 0.
        term: usize,
        /// Its shape.
        shape: Vec<i64>,
    },
    /// A loss that does not require a gradient.
    #[error(
        "the loss has no gradient: none of its {terms} terms depends on a trainable parameter, or they \
         were computed under no_grad or detached"
    )]
    WithoutGradient {
        /// Number of its terms.
        terms: usize,
    },
    /// A weight that is not a scalar.
    #[error(
        "the weight of term {term} of the loss (counted from 0) has the shape {shape:?}: sum it to \
         one number"
    )]
    WeightNotScalar {
        /// The term's index, counted from 0.
        term: usize,
        /// The weight's shape.
        shape: Vec<i64>,
    },
    /// A loss with other terms than those of earlier micro-batches.
    #[error(
        "a micro-batch's loss has {now} terms, but earlier ones had {before}, or terms of different kinds: \
         build the same loss for every micro-batch"
    )]
    TermsDiffer {
        /// Number of terms in earlier micro-batches.
        before: usize,
        /// Number of terms in this one.
        now: usize,
    },
    /// A denominator of 0.
    #[error(
        "the weights of term {term} of the loss (counted from 0) sum to 0 over the mini-batch: \
         there is nothing to take a mean over, so leave the mini-batch out"
    )]
    ZeroDenominator {
        /// The term's index, counted from 0.
        term: usize,
    },
    /// A loss that is not finite.
    #[error(
        "term {term} of the loss (counted from 0) is {value} (weight {weight}) in micro-batch \
         {micro_batch}: nothing was changed; lower the learning rate, check the data, use `Loss::ratio` \
         where a micro-batch may have a weight of 0, or accept non-finite losses with \
         `NonFinitePolicy::Allow`"
    )]
    NonFinite {
        /// The term's index, counted from 0.
        term: usize,
        /// The micro-batch, counted from 0.
        micro_batch: usize,
        /// The term's value.
        value: f64,
        /// Its weight.
        weight: f64,
    },
}
