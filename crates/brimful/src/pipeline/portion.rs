//! A mini-batch's micro-batches, and which of them are this rank's pipeline's.

use std::ops::Range;
use std::sync::Arc;

use super::ranks::Ranks;
use crate::loss::Part;
use crate::{Result, Size, split};

/// How a mini-batch is dealt out to pipelines.
#[derive(Debug, Clone)]
pub(super) struct Portion {
    pub(super) all: Vec<Range<usize>>,
    /// The micro-batches of this pipeline; none where there are fewer than pipelines.
    own: Range<usize>,
}

impl Ranks {
    /// The same samples in a cut that can be dealt out evenly: a number of micro-batches is each
    /// pipeline's, a size is the largest.
    pub(super) fn dealt(&self, cut: Vec<Range<usize>>, size: Size) -> Result<Vec<Range<usize>>> {
        if self.replicas == 1 {
            return Ok(cut);
        }
        let count = match size {
            Size::Count(count) => count * self.replicas,
            _ => cut.len().next_multiple_of(self.replicas),
        };
        split::by_count(cut.last().map_or(0, |last| last.end), count)
    }

    /// This pipeline's part: consecutive micro-batches, so that outputs can be joined.
    pub(super) fn portion(&self, all: &[Range<usize>]) -> Result<Portion> {
        let parts = split::by_count(all.len(), self.replicas)?;
        let own = parts.get(self.replica).cloned().unwrap_or(all.len()..all.len());
        Ok(Portion { all: all.to_vec(), own })
    }
}

impl Portion {
    /// The samples of each of this pipeline's micro-batches.
    pub(super) fn own(&self) -> &[Range<usize>] {
        &self.all[self.own.clone()]
    }

    /// The number of the first of them among all.
    pub(super) fn first(&self) -> usize {
        self.own.start
    }

    /// Samples of the whole mini-batch.
    pub(super) fn samples(&self) -> f64 {
        self.all.iter().map(ExactSizeIterator::len).sum::<usize>() as f64
    }

    /// The places of this pipeline's micro-batches in the step.
    pub(super) fn parts(&self) -> Arc<[Part]> {
        let unit = self.samples();
        let part = |(i, range): (usize, &Range<usize>)| Part {
            samples: range.len() as f64,
            unit,
            first: i == 0,
        };
        (self.own.start..).zip(self.own()).map(part).collect()
    }
}
