//! Attempts at a mini-batch: planned, open between forward and backward, and run.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::run::Mode;
use crate::batch::{BatchError, Samples};
use crate::loss::MicroBatchWeight;
use crate::step::{BatchRole, Counted, Exchange, Handshake, MicroBatches, PartReport, TermGroup};
use crate::{Error, Result};
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::Actions;

/// Plan of one attempt.
#[derive(Debug)]
pub(crate) struct AttemptPlan {
    pub(crate) portions: Vec<Portion>,
    pub(crate) mode: Mode,
    pub(super) actions: Vec<Arc<Actions>>,
    pub(super) unit: f64,
    pub(super) seed: u64,
}

/// Forward that waits for its backward.
#[derive(Debug)]
pub(crate) struct OpenForward {
    pub(super) number: u64,
    pub(super) plan: AttemptPlan,
    pub(super) rows: Range<usize>,
    pub(super) exchange: Exchange,
    pub(super) handshake: Handshake,
    pub(super) start: Instant,
}

/// Mini-batch, or several of an accumulation window, that all workers of this process have run. The workers
/// hold the state that a commit or an undo needs.
#[derive(Debug)]
pub(crate) struct PipelineAttempt {
    pub(super) actions: Arc<Actions>,
    pub(super) shares: Vec<usize>,
    pub(super) sizes: Vec<usize>,
    /// Divisor of the gradients until the commit.
    pub(super) unit: f64,
    /// Bytes that each worker's device must have; none if its memory is not counted.
    pub(super) needs: Vec<Option<Bytes>>,
    pub(super) normalised: bool,
    /// Number of BatchNorm layers in this process that are not this library's.
    pub(super) unmanaged_norms: usize,
    /// Workers' reports, if the workers reported as soon as they had run.
    pub(super) reports: Option<Vec<PartReport>>,
    /// Loss of `backward_whole`, which the caller's thread computed on all outputs.
    pub(crate) loss: Option<(Counted, Vec<TermGroup>)>,
    /// Whether the attempt waits for later mini-batches of its accumulation window.
    pub(super) waits: bool,
}

/// Micro-batches of one pipeline in a step.
#[derive(Debug, Clone)]
pub(crate) struct Portion {
    /// Sample ranges of the micro-batches within this process's mini-batch; none if there are too few
    /// samples.
    pub(crate) ranges: Vec<Range<usize>>,
    /// Number of the portion's first micro-batch, counted over all replicas.
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
