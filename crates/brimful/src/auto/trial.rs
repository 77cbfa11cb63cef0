//! Question to the policy and its answer: a trial of one size.

use super::decision::Why;

/// Situation at a decision.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Situation {
    /// Largest size predicted to fit, if anything is known.
    pub(crate) fits: Option<usize>,
    /// Largest size whose need has been measured.
    pub(crate) seen: usize,
    /// Largest size that the memory model may be extrapolated to.
    pub(crate) reach: usize,
    /// Largest size that fits in the worst case: see
    /// [`MemoryModel::sure`](super::memory_model::MemoryModel::sure).
    pub(crate) sure: usize,
    /// Bytes free for the step.
    pub(crate) available: u64,
    /// Numbers of samples in the mini-batch: those still to be run, and all.
    pub(crate) left: usize,
    pub(crate) samples: usize,
}

impl Situation {
    pub(super) fn is_start(&self) -> bool {
        self.left == self.samples
    }
}

/// Trial of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SizeTrial {
    pub(crate) size: usize,
    /// Number of micro-batches of exactly that size; `None` for all remaining samples, in near-equal ones.
    pub(crate) micro_batches: Option<usize>,
    pub(crate) why: Why,
    /// Whether to time it.
    pub(crate) timed: bool,
}

impl SizeTrial {
    /// Returns a trial that measures the rate of a size by a few micro-batches, or by a whole step.
    pub(super) fn measure(size: usize, micro_batches: Option<usize>) -> Self {
        Self { size, micro_batches, why: Why::Measure, timed: true }
    }
}

/// Returns the size of the near-equal micro-batches that `samples` are cut into, of at most `size` each.
pub(crate) fn in_near_equal_parts(samples: usize, size: usize) -> usize {
    samples.div_ceil(samples.div_ceil(size))
}
