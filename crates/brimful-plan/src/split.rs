//! Cuts the samples of a mini-batch into micro-batches: near-equal, in order, every sample once.
//!
//! Near-equal, because a short last micro-batch costs nearly the time of a full one, and a last
//! micro-batch of one sample is what batch normalisation cannot digest: 65 samples by 16 are 5
//! micro-batches of 13, not 4 of 16 and one of 1.
//!
//! ```
//! # use brimful_plan as brimful;
//! use brimful::split;
//!
//! assert_eq!(split::by_size(8, 3)?, [0..3, 3..6, 6..8]);
//! assert_eq!(split::by_count(8, 2)?, [0..4, 4..8]);
//! # Ok::<(), brimful::split::SplitError>(())
//! ```

use std::ops::Range;

use thiserror::Error;

/// Samples that cannot be cut as asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SplitError {
    /// A mini-batch without samples.
    #[error("the batch is empty: give it at least one sample")]
    NoSamples,
    /// Micro-batches of no samples.
    #[error(
        "a micro-batch cannot have 0 samples: give it at least 1, or all {samples} of the mini-batch"
    )]
    SizeOfZero {
        /// The samples of the mini-batch.
        samples: usize,
    },
    /// A mini-batch in no micro-batches.
    #[error("{samples} samples cannot be cut into 0 micro-batches: ask for at least 1")]
    CountOfZero {
        /// The samples of the mini-batch.
        samples: usize,
    },
}

/// As few micro-batches as there can be with at most `size` samples each. Their lengths differ by
/// at most one, the longer ones first. A `size` above `samples` leaves the mini-batch whole.
///
/// # Errors
/// When there are no samples, or `size` is 0.
pub fn by_size(samples: usize, size: usize) -> Result<Vec<Range<usize>>, SplitError> {
    match (samples, size) {
        (0, _) => Err(SplitError::NoSamples),
        (_, 0) => Err(SplitError::SizeOfZero { samples }),
        _ => Ok(near_equal(samples, samples.div_ceil(size))),
    }
}

/// `count` micro-batches, or one for each sample where there are fewer samples than that. Their
/// lengths differ by at most one, the longer ones first.
///
/// # Errors
/// When there are no samples, or `count` is 0.
pub fn by_count(samples: usize, count: usize) -> Result<Vec<Range<usize>>, SplitError> {
    match (samples, count) {
        (0, _) => Err(SplitError::NoSamples),
        (_, 0) => Err(SplitError::CountOfZero { samples }),
        _ => Ok(near_equal(samples, count.min(samples))),
    }
}

/// The first `samples % count` ranges take one sample more than the others.
fn near_equal(samples: usize, count: usize) -> Vec<Range<usize>> {
    let (length, longer) = (samples / count, samples % count);
    // Of the i ranges before it, as many as are among the first `longer` have one sample more.
    let start = |i: usize| i * length + i.min(longer);
    (0..count).map(|i| start(i)..start(i + 1)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lengths(ranges: Result<Vec<Range<usize>>, SplitError>) -> Vec<usize> {
        ranges.expect("a split").into_iter().map(|range| range.len()).collect()
    }

    #[test]
    fn micro_batches_are_near_equal_and_the_longer_ones_come_first() {
        assert_eq!(lengths(by_size(65, 16)), [13; 5]);
        assert_eq!(lengths(by_size(5, 2)), [2, 2, 1]);
        assert_eq!(lengths(by_size(12, 3)), [3; 4]);
        assert_eq!(lengths(by_size(10, 4)), [4, 3, 3]);
        assert_eq!(lengths(by_count(10, 4)), [3, 3, 2, 2]);
    }

    #[test]
    fn the_edges_are_no_exceptions() {
        assert_eq!(lengths(by_size(1, 1)), [1]);
        assert_eq!(lengths(by_size(7, 7)), [7]);
        assert_eq!(lengths(by_size(7, 100)), [7]);
        assert_eq!(lengths(by_size(7, usize::MAX)), [7]);
        assert_eq!(lengths(by_size(7, 1)), [1; 7]);
        assert_eq!(lengths(by_count(7, 1)), [7]);
        assert_eq!(lengths(by_count(3, 8)), [1; 3]);
        assert_eq!(lengths(by_count(3, usize::MAX)), [1; 3]);
        assert_eq!(lengths(by_size(usize::MAX, usize::MAX / 2 + 1)).len(), 2);
    }

    #[test]
    fn nothing_to_cut_and_nothing_to_cut_it_into_are_refused() {
        assert_eq!(by_size(0, 16), Err(SplitError::NoSamples));
        assert_eq!(by_count(0, 4), Err(SplitError::NoSamples));
        let size = by_size(65, 0).expect_err("a size of 0").to_string();
        assert_eq!(
            size,
            "a micro-batch cannot have 0 samples: give it at least 1, or all 65 of the mini-batch"
        );
        let count = by_count(65, 0).expect_err("a count of 0").to_string();
        assert_eq!(count, "65 samples cannot be cut into 0 micro-batches: ask for at least 1");
    }

    /// No file of failures, which miri could not write.
    fn config() -> ProptestConfig {
        let cases = if cfg!(miri) { 16 } else { 256 };
        ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
    }

    fn check(ranges: &[Range<usize>], samples: usize) -> Result<(), TestCaseError> {
        prop_assert_eq!(ranges.first().map(|range| range.start), Some(0));
        prop_assert_eq!(ranges.last().map(|range| range.end), Some(samples));
        for pair in ranges.windows(2) {
            prop_assert_eq!(pair[0].end, pair[1].start);
            prop_assert!(pair[0].len() >= pair[1].len());
        }
        let (longest, shortest) = (ranges[0].len(), ranges[ranges.len() - 1].len());
        prop_assert!(shortest >= 1 && longest - shortest <= 1);
        Ok(())
    }

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn by_size_takes_every_sample_once_and_never_too_many(
            samples in 1..2000_usize, size in 1..2500_usize,
        ) {
            let ranges = by_size(samples, size).expect("a split");
            check(&ranges, samples)?;
            prop_assert!(ranges[0].len() <= size);
            prop_assert_eq!(ranges.len(), samples.div_ceil(size));
        }

        #[test]
        fn by_count_takes_every_sample_once_and_makes_as_many_as_it_can(
            samples in 1..2000_usize, count in 1..2500_usize,
        ) {
            let ranges = by_count(samples, count).expect("a split");
            check(&ranges, samples)?;
            prop_assert_eq!(ranges.len(), count.min(samples));
        }
    }
}
