//! How a mini-batch is cut.

use std::ops::Range;

use super::StepError;
use crate::batch::Samples;
use crate::{Result, split};

/// How a mini-batch is cut into micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Size {
    /// At most so many samples each.
    Fixed(usize),
    /// So many micro-batches, or one a sample where there are fewer.
    Count(usize),
    /// At most so many tokens each, padding included: for [`Sequences`](crate::batch::Sequences).
    Tokens(usize),
    /// The fastest size that fits the memory, found while the first steps run.
    Auto,
    /// The largest size that fits the memory.
    Largest,
}

impl Size {
    /// The samples, cut; `None` where the size is automatic.
    pub(crate) fn cut(self, samples: &Samples) -> Result<Option<Vec<Range<usize>>>> {
        Ok(Some(match (self, samples.lengths()) {
            (Self::Fixed(size), _) => split::by_size(samples.count(), size)?,
            (Self::Count(count), None) => split::by_count(samples.count(), count)?,
            (Self::Count(count), Some(lengths)) => split::by_count_of_tokens(lengths, count)?,
            (Self::Tokens(tokens), Some(lengths)) => split::by_tokens(lengths, tokens)?,
            (Self::Tokens(tokens), None) => return Err(StepError::NoSequences { tokens }.into()),
            (Self::Auto | Self::Largest, _) => return Ok(None),
        }))
    }

    /// A given size of so many samples, or tokens where samples are sequences of unlike length.
    pub(crate) fn of_units(samples: &Samples, units: usize) -> Self {
        match samples.lengths() {
            None => Self::Fixed(units),
            Some(_) => Self::Tokens(units),
        }
    }

    /// Refuses micro-batches of nothing, and none of them.
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

impl From<usize> for Size {
    /// So many micro-batches.
    fn from(count: usize) -> Self {
        Self::Count(count)
    }
}
