//! Attempts at a mini-batch: planned, open between forward and backward, and run.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::portion::Portion;
use super::run::Mode;
use crate::step::{Counted, Exchange, Handshake, PartReport, TermGroup};
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
    /// BatchNorm layers in this process that are not this library's.
    pub(super) unmanaged_norms: usize,
    /// Reports of the workers, if they made them at once.
    pub(super) reports: Option<Vec<PartReport>>,
    /// Loss of `backward_whole`, which the caller's thread computed on all outputs.
    pub(crate) loss: Option<(Counted, Vec<TermGroup>)>,
    /// Whether it waits for later mini-batches.
    pub(super) waits: bool,
}
