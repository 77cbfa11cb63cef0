//! Cuts the samples of a mini-batch into micro-batches: near-equal, in order, every sample once.
//!
//! Near-equal, because a short last micro-batch costs nearly the time of a full one, and batch
//! normalisation cannot train with a last micro-batch of one sample: 65 samples by 16 are 5 micro-batches
//! of 13, not 4 of 16 and one of 1.
//!
//! ```
//! use brimful_plan::split;
//!
//! assert_eq!(split::by_size(8, 3)?, [0..3, 3..6, 6..8]);
//! assert_eq!(split::by_count(8, 2)?, [0..4, 4..8]);
//! // Sequences, each micro-batch as wide as its longest: 1 × 900, 2 × 500 and 3 × 300 tokens.
//! assert_eq!(split::by_tokens(&[900, 500, 400, 300, 200, 200], 1000)?, [0..1, 1..3, 3..6]);
//! # Ok::<(), brimful_plan::split::SplitError>(())
//! ```

use std::ops::Range;

use thiserror::Error;

use crate::bisect::count_while;

/// Error for samples that cannot be cut as asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SplitError {
    /// Mini-batch without samples.
    #[error("the batch is empty: give it at least one sample")]
    NoSamples,
    /// Micro-batch size of 0.
    #[error(
        "a micro-batch cannot have 0 samples: give it at least 1, or all {samples} of the mini-batch"
    )]
    SizeOfZero {
        /// Number of samples in the mini-batch.
        samples: usize,
    },
    /// Micro-batch count of 0.
    #[error("{samples} samples cannot be cut into 0 micro-batches: ask for at least 1")]
    CountOfZero {
        /// Number of samples in the mini-batch.
        samples: usize,
    },
    /// Sequence that is longer than a micro-batch.
    #[error(
        "the longest sequence has {longest} tokens and does not fit a micro-batch of {tokens}: give \
         micro-batches at least {longest} tokens, or cut the sequence"
    )]
    SequenceTooLong {
        /// Tokens of the longest sequence, padding included.
        longest: usize,
        /// Largest number of tokens in a micro-batch.
        tokens: usize,
    },
}

/// Returns the fewest micro-batches with at most `size` samples each. Their lengths differ by at most one,
/// the longer ones first. A `size` above `samples` leaves the mini-batch whole.
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

/// Returns `count` micro-batches, or one for each sample if there are fewer samples. Their lengths differ
/// by at most one, the longer ones first.
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

/// Returns micro-batches of at most `tokens` tokens each, padding included: a micro-batch is as wide as its
/// longest sequence. Each micro-batch is as full as possible. So if sequences are sorted by length, the longest
/// first, the shape of a micro-batch depends only on the length of its first sequence.
///
/// # Errors
/// When there are no sequences, or one takes more than `tokens`.
pub fn by_tokens(lengths: &[usize], tokens: usize) -> Result<Vec<Range<usize>>, SplitError> {
    let longest = longest(lengths)?;
    match longest > tokens {
        true => Err(SplitError::SequenceTooLong { longest, tokens }),
        false => Ok(filled(lengths, tokens)),
    }
}

/// Returns `count` micro-batches, or one for each sequence if there are fewer. The fullest has as few
/// tokens as possible.
///
/// # Errors
/// When there are no sequences, or `count` is 0.
pub fn by_count_of_tokens(
    lengths: &[usize],
    count: usize,
) -> Result<Vec<Range<usize>>, SplitError> {
    let least = longest(lengths)?;
    if count == 0 {
        return Err(SplitError::CountOfZero { samples: lengths.len() });
    }
    // Upper bound: all sequences in one micro-batch.
    let most = least.saturating_mul(lengths.len());
    let are_too_few = |more: usize| filled(lengths, least + more).len() > count;
    let mut ranges = filled(lengths, least + count_while(most - least, are_too_few));
    while ranges.len() < count.min(lengths.len()) {
        halve_the_longest(&mut ranges);
    }
    Ok(ranges)
}

/// Splits the micro-batch with the most sequences in two: schedules need an exact number of micro-batches.
fn halve_the_longest(ranges: &mut Vec<Range<usize>>) {
    let longest = (0..ranges.len()).rev().max_by_key(|&i| ranges[i].len());
    if let Some(i) = longest {
        let Range { start, end } = ranges[i].clone();
        let middle = start + (end - start) / 2;
        ranges.splice(i..=i, [start..middle, middle..end]);
    }
}

fn longest(lengths: &[usize]) -> Result<usize, SplitError> {
    lengths.iter().copied().max().ok_or(SplitError::NoSamples)
}

/// Fills range after range. A sequence that is too long gets a range of its own.
fn filled(lengths: &[usize], tokens: usize) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut start = 0;
    let mut widest = 0;
    for (i, &length) in lengths.iter().enumerate() {
        let wider = length.max(widest);
        if i > start && wider.saturating_mul(i + 1 - start) > tokens {
            ranges.push(start..i);
            start = i;
            widest = length;
        } else {
            widest = wider;
        }
    }
    ranges.push(start..lengths.len());
    ranges
}

/// Returns the start of range `number`, counted from 0, of `count` near-equal ranges. The ranges are those
/// of [`by_size`] and [`by_count`], but are not listed, so there may be very many.
#[must_use]
pub fn start(samples: usize, count: usize, number: usize) -> usize {
    let count = count.max(1);
    // The first `samples % count` ranges have one sample more than the others.
    number * (samples / count) + number.min(samples % count)
}

fn near_equal(samples: usize, count: usize) -> Vec<Range<usize>> {
    (0..count).map(|i| start(samples, count, i)..start(samples, count, i + 1)).collect()
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

    #[test]
    fn a_sequence_that_no_micro_batch_has_room_for_is_refused_with_both_numbers() {
        assert_eq!(by_tokens(&[], 16), Err(SplitError::NoSamples));
        assert_eq!(by_count_of_tokens(&[3], 0), Err(SplitError::CountOfZero { samples: 1 }));
        assert_eq!(
            by_tokens(&[10, 64], 63).expect_err("too long").to_string(),
            "the longest sequence has 64 tokens and does not fit a micro-batch of 63: give \
             micro-batches at least 64 tokens, or cut the sequence"
        );
    }

    #[test]
    fn a_count_of_micro_batches_shares_tokens_out_evenly() {
        let lengths = [8, 4, 4, 2, 2, 2, 2];
        assert_eq!(by_count_of_tokens(&lengths, 3), Ok(vec![0..1, 1..3, 3..7]));
        assert_eq!(by_count_of_tokens(&lengths, 100).expect("a split").len(), 7);
        assert_eq!(by_count_of_tokens(&lengths, 1).expect("a split").len(), 1);
    }

    /// Stores no failures in a file, which miri could not write.
    fn config() -> ProptestConfig {
        let cases = if cfg!(miri) { 16 } else { 256 };
        ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
    }

    /// Checks that every sample is in one range, in order.
    fn check_order(ranges: &[Range<usize>], samples: usize) -> Result<(), TestCaseError> {
        prop_assert_eq!(ranges.first().map(|range| range.start), Some(0));
        prop_assert_eq!(ranges.last().map(|range| range.end), Some(samples));
        prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
        prop_assert!(ranges.iter().all(|range| !range.is_empty()));
        Ok(())
    }

    fn check(ranges: &[Range<usize>], samples: usize) -> Result<(), TestCaseError> {
        check_order(ranges, samples)?;
        prop_assert!(ranges.windows(2).all(|pair| pair[0].len() >= pair[1].len()));
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
        fn by_tokens_takes_every_sequence_once_and_keeps_the_budget(
            lengths in prop::collection::vec(1..300_usize, 1..200), spare in 0..2000_usize,
        ) {
            let tokens = longest(&lengths).expect("sequences") + spare;
            let ranges = by_tokens(&lengths, tokens).expect("a split");
            check_order(&ranges, lengths.len())?;
            let taken = |range: &Range<usize>| {
                range.len() * longest(&lengths[range.clone()]).expect("sequences")
            };
            prop_assert!(ranges.iter().all(|range| taken(range) <= tokens));
            // Checks that no range could also take the next one's first sequence.
            for pair in ranges.windows(2) {
                prop_assert!(taken(&(pair[0].start..pair[1].start + 1)) > tokens);
            }
            // Checks that `by_count_of_tokens`, given only their number, makes as many micro-batches, and none
            // fuller.
            let counted = by_count_of_tokens(&lengths, ranges.len()).expect("a split");
            check_order(&counted, lengths.len())?;
            prop_assert_eq!(counted.len(), ranges.len());
            prop_assert!(
                counted.iter().map(taken).max() <= ranges.iter().map(taken).max()
            );
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
