//! Which micro-batches each of this process's pipelines runs in a step.

use std::ops::Range;
use std::sync::Arc;

use crate::batch::{BatchError, Samples};
use crate::loss::MicroBatchWeight;
use crate::step::{BatchRole, Opening, Size};
use crate::{Error, Result};

/// One pipeline's micro-batches in a step.
#[derive(Debug, Clone)]
pub(crate) struct Portion {
    /// The samples of each, counted in this process's mini-batch; none where there are too few.
    pub(crate) ranges: Vec<Range<usize>>,
    /// The number of the first of them among those of all replicas.
    pub(crate) first: usize,
    pub(crate) weights: Arc<[MicroBatchWeight]>,
}

impl Portion {
    pub(crate) fn samples(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }
}

/// The portions of so many pipelines in this process: near-equal parts of its samples, each cut by the
/// size.
pub(crate) fn portions(
    opening: &Opening,
    role: BatchRole,
    size: Size,
    replicas: usize,
) -> Result<Vec<Portion>> {
    let cut = |samples: &Samples| match samples.count() {
        0 => Ok(Vec::new()),
        _ => size.cut(samples)?.ok_or(Error::from(BatchError::NothingToCut)),
    };
    // Counted on through all replicas: two micro-batches of one number would draw the same.
    let mut first = 0;
    for samples in opening.before() {
        first += cut(samples)?.len();
    }
    let mut all = Vec::with_capacity(replicas);
    for share in opening.own().shares(replicas)? {
        let ranges = cut(&opening.own().part(&share))?.into_iter();
        let ranges: Vec<_> =
            ranges.map(|range| share.start + range.start..share.start + range.end).collect();
        let weights = ranges.iter().map(|range| MicroBatchWeight {
            samples: range.len() as f64,
            unit: role.unit,
            first: role.first && range.start == 0,
        });
        let weights = weights.collect();
        let count = ranges.len();
        all.push(Portion { ranges, first, weights });
        first += count;
    }
    Ok(all)
}
