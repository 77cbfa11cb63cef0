//! Sizes of micro-batches.

use std::ops::Range;

use super::StepError;
use crate::Result;
use crate::batch::Samples;
use brimful_plan::split;

/// Size of the micro-batches, or their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MicroBatches {
    /// At most this many samples each.
    Samples(usize),
    /// This many micro-batches, or one per sample where there are fewer.
    Count(usize),
    /// At most this many tokens each, padding included: for [`Sequences`](crate::batch::Sequences).
    Tokens(usize),
    /// The fastest size that fits into memory, found during the first steps.
    Auto,
    /// The largest size that fits into memory.
    Largest,
}

impl MicroBatches {
    /// Cuts the samples; `None` for an automatic size.
    pub(crate) fn cut(self, samples: &Samples) -> Result<Option<Vec<Range<usize>>>> {
        Ok(Some(match (self, samples.lengths()) {
            (Self::Samples(size), _) => split::by_size(samples.count(), size)?,
            (Self::Count(count), None) => split::by_count(samples.count(), count)?,
            (Self::Count(count), Some(lengths)) => split::by_count_of_tokens(lengths, count)?,
            (Self::Tokens(tokens), Some(lengths)) => split::by_tokens(lengths, tokens)?,
            (Self::Tokens(tokens), None) => return Err(StepError::NoSequences { tokens }.into()),
            (Self::Auto | Self::Largest, _) => return Ok(None),
        }))
    }

    /// Creates a size in samples, or in tokens where samples are sequences of different lengths.
    pub(crate) fn of_units(samples: &Samples, units: usize) -> Self {
        match samples.lengths() {
            None => Self::Samples(units),
            Some(_) => Self::Tokens(units),
        }
    }

    /// Fails for micro-batches without samples, and for zero micro-batches.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            Self::Tokens(tokens) => Ok(split::by_tokens(&[1], tokens).map(drop)?),
            _ => self.cut(&Samples::alike(1)).map(drop),
        }
    }

    pub(crate) fn is_automatic(self) -> bool {
        matches!(self, Self::Auto | Self::Largest)
    }
}
