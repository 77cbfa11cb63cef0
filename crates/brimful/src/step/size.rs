//! How a mini-batch is cut.

use std::ops::Range;

use crate::{Result, split};

/// How a mini-batch is cut into micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Size {
    /// At most so many samples each.
    Fixed(usize),
    /// So many micro-batches, or one a sample where there are fewer.
    Count(usize),
    /// The fastest size that fits the memory, found while the first steps run.
    Auto,
    /// The largest size that fits the memory.
    Largest,
}

impl Size {
    /// The samples, cut; `None` where the size is automatic.
    pub(crate) fn cut(self, samples: usize) -> Result<Option<Vec<Range<usize>>>> {
        match self {
            Self::Fixed(size) => Ok(Some(split::by_size(samples, size)?)),
            Self::Count(count) => Ok(Some(split::by_count(samples, count)?)),
            Self::Auto | Self::Largest => Ok(None),
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
