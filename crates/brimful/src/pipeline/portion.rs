//! Divides a mini-batch's micro-batches among this process's pipelines.

use std::ops::Range;
use std::sync::Arc;

use crate::batch::{BatchError, Samples};
use crate::loss::MicroBatchWeight;
use crate::step::{BatchRole, Handshake, MicroBatches};
use crate::{Error, Result};

/// Micro-batches of one pipeline in a step.
#[derive(Debug, Clone)]
pub(crate) struct Portion {
    /// Sample ranges of the micro-batches within this process's mini-batch; none if there are too few
    /// samples.
    pub(crate) ranges: Vec<Range<usize>>,
    /// Number of its first micro-batch, counted over all replicas.
    pub(crate) first: usize,
    pub(crate) weights: Arc<[MicroBatchWeight]>,
}

impl Portion {
    pub(crate) fn samples(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }
}

/// Divides this process's samples into near-equal portions, one for each of its pipelines, and cuts each
/// portion into micro-batches.
pub(crate) fn portions(
    handshake: &Handshake,
    role: BatchRole,
    size: MicroBatches,
    replicas: usize,
) -> Result<Vec<Portion>> {
    let cut = |samples: &Samples| match samples.count() {
        0 => Ok(Vec::new()),
        _ => size.cut(samples)?.ok_or(Error::from(BatchError::NothingToCut)),
    };
    // Counted through all replicas: two micro-batches with one number would draw the same random numbers.
    let mut first = 0;
    for samples in handshake.before() {
        first += cut(samples)?.len();
    }
    let mut all = Vec::with_capacity(replicas);
    for share in handshake.own().shares(replicas)? {
        let ranges = cut(&handshake.own().part(&share))?.into_iter();
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
