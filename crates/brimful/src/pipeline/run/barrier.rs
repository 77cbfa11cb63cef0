//! Barrier across all micro-batches of a step, before a stage that begins with an exact BatchNorm.
//!
//! ```text
//!   F of the previous stage   counts each micro-batch as it sends it
//!   F of the stage            all are counted: their statistics normalise each one
//!   B of the stage            each adds its share of the gradient of these statistics
//!   B of the previous stage   all shares are there: they complete the gradient of each one
//! ```

use tch::Tensor;

use crate::nn::WholeBatchNorm;
use crate::pipeline::site::Stage;
use crate::statistics::{PairSum, WholeBatch};

/// State of a barrier.
#[derive(Debug, Default)]
pub(super) struct Barrier {
    pub(super) micro_batches: usize,
    /// Number of micro-batches counted.
    pub(super) arrived: usize,
    pub(super) statistics: WholeBatch,
    /// Statistics, once all micro-batches are counted.
    pub(super) whole: Option<WholeBatchNorm>,
    /// Number of micro-batches whose backward is done, and the sums of their shares, by group of terms.
    pub(super) returned: usize,
    pub(super) sums: Vec<PairSum>,
    /// Missing part of the gradients, by group, once all shares are there.
    pub(super) missing: Vec<Option<[Tensor; 2]>>,
}

/// Returns the barrier before each of a worker's stages, where it has one.
pub(super) fn before(stages: &[Stage], micro_batches: usize) -> Vec<Option<Barrier>> {
    let barrier =
        |stage: &Stage| stage.exact_norm().map(|_| Barrier { micro_batches, ..Barrier::default() });
    stages.iter().map(barrier).collect()
}
