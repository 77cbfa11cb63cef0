//! What the policy is asked, and what it answers: a trial of one size.

use std::ops::Range;

use super::decision::{Decision, Why};
use super::sizer::{MemoryRoom, Sizer, is_alone, tightest};
use crate::bytes::Bytes;

/// What is known when a decision is due.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Situation {
    /// The largest size that should fit, if anything is known of that.
    pub(crate) fits: Option<usize>,
    /// The largest size whose need has been measured.
    pub(crate) seen: usize,
    /// The largest size that the memory model may be extrapolated to.
    pub(crate) reach: usize,
    /// The largest size that fits in the worst case: see [`MemoryModel::sure`](super::memory_model::MemoryModel::sure).
    pub(crate) sure: usize,
    /// Bytes free for the step.
    pub(crate) available: u64,
    /// Samples of the mini-batch that are still to be run, and all of them.
    pub(crate) left: usize,
    pub(crate) samples: usize,
}

impl Situation {
    pub(super) fn is_start(&self) -> bool {
        self.left == self.samples
    }
}

/// What to run next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SizeTrial {
    pub(crate) size: usize,
    /// So many micro-batches of exactly that size; `None`: all that is left, in near-equal ones.
    pub(crate) micro_batches: Option<usize>,
    pub(crate) why: Why,
    /// Whether its time is wanted.
    pub(crate) timed: bool,
}

impl SizeTrial {
    /// A few micro-batches of a size, or a whole step of it, to see how fast it is.
    pub(super) fn measure(size: usize, micro_batches: Option<usize>) -> Self {
        Self { size, micro_batches, why: Why::Measure, timed: true }
    }

    /// The decision to run it, of which nothing has come yet.
    pub(crate) fn decision(
        &self,
        ranges: &[Range<usize>],
        sizer: &Sizer,
        rooms: &[MemoryRoom],
    ) -> Decision {
        // The very first probe has no measurement behind it: what the model would say is its floor.
        let known = !matches!(self.why, Why::Probe) || sizer.lines().is_some();
        let predicted = match is_alone(ranges) {
            true => sizer.predict_alone(self.size),
            false => sizer.predict(self.size),
        };
        Decision {
            size: self.size,
            micro_batches: ranges.len(),
            why: self.why,
            predicted: predicted.filter(|_| known).map(Bytes),
            measured: None,
            available: Bytes(tightest(rooms)),
            failed: false,
        }
    }
}

/// What a cut by `size` makes of so many samples.
pub(crate) fn in_near_equal_parts(samples: usize, size: usize) -> usize {
    samples.div_ceil(samples.div_ceil(size))
}
