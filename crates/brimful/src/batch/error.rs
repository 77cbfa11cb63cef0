//! Errors of cutting, lending and joining batches.

use thiserror::Error;

/// A batch that cannot be cut, lent or joined.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// A batch without samples.
    #[error("the batch is empty: give it at least one sample")]
    Empty,
    /// A micro-batch that was changed in place, although it is a view of the mini-batch.
    #[error(
        "tensor {leaf} of a micro-batch was changed in place, but it shares memory with the mini-batch, \
         which a retry reads again: make a new tensor (x / 255.0 instead of x /= 255.0), or change a copy"
    )]
    Changed {
        /// Index of the mini-batch's tensor, counted from 0.
        leaf: usize,
    },
    /// Leaves of a batch with different numbers of samples.
    #[error(
        "the leaves of a batch must have the same length, but are {} long: give each leaf the same \
         samples, and wrap in `Shared` what all micro-batches share",
        enumerate(lengths)
    )]
    LeafLengthsDiffer {
        /// Lengths of the leaves that are cut, in the order of the fields.
        lengths: Vec<usize>,
    },
    /// A leaf without a first dimension.
    #[error(
        "leaf {leaf} of the batch (counted from 0) is a single number, which cannot be cut: wrap \
         it in `Shared`, or give it a value for each sample"
    )]
    LeafOfOneNumber {
        /// The leaf's index, counted from 0.
        leaf: usize,
    },
    /// A leaf that is an undefined tensor.
    #[error(
        "leaf {leaf} of the batch (counted from 0) is an undefined tensor: leave it out, or make it an \
         `Option` that is `None`"
    )]
    LeafUndefined {
        /// The leaf's index, counted from 0.
        leaf: usize,
    },
    /// A batch with shared values only, or with none.
    #[error("the batch has nothing to cut: give it a tensor that is not `Shared`")]
    NothingToCut,
    /// A range of samples that a leaf does not have.
    #[error(
        "samples {start}..{end} cannot be cut out of leaf {leaf} of the batch (counted from 0), \
         which is {length} long: `batch::len` returns the number of samples"
    )]
    SliceOutside {
        /// First sample of the range.
        start: usize,
        /// End of the range.
        end: usize,
        /// The leaf's index, counted from 0.
        leaf: usize,
        /// Number of samples that it has.
        length: usize,
    },
    /// A join of no parts.
    #[error("there is nothing to join: give at least one part")]
    NothingToJoin,
    /// Parts that are not cuts of one batch.
    #[error(
        "part {part} (counted from 0) cannot be joined to part 0: part {part} has {other} where part 0 has \
         {first}; only tensors may differ between parts: if a plain number differs, make it a tensor"
    )]
    PartsDiffer {
        /// Index of the part that differs from the first.
        part: usize,
        /// Description in the first part.
        first: String,
        /// Description in this part.
        other: String,
    },
}

/// Joins numbers, such as `8, 8 and 6`.
pub(crate) fn enumerate(numbers: &[usize]) -> String {
    let words: Vec<String> = numbers.iter().map(usize::to_string).collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}
