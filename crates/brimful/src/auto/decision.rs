//! Decisions of the automatic size and their reasons, for reports and log lines; and trials, from which they are
//! made.

use std::fmt;

use serde::Serialize;

use brimful_plan::bytes::Bytes;

/// Reason for taking a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Why {
    /// A small size, to measure what a sample needs.
    Probe,
    /// Predicted from the needs of samples of other shapes.
    Predicted,
    /// Measures the rate of this size.
    Measure,
    /// The fastest size of those that fit.
    Fastest,
    /// The largest size that fits.
    Largest,
    /// Measurements since the last choice correct the prediction.
    Corrected,
    /// Memory ran out at a larger size.
    BackOff,
    /// The allocator had to empty its cache at a larger size, in consecutive steps.
    Thrash,
    /// Less memory is free than before.
    LessMemory,
    /// More memory is free than before.
    MoreMemory,
    /// A larger size failed earlier, but many steps have succeeded since.
    Calm,
    /// Found by an earlier run.
    Remembered,
    /// Other ranks allow no larger size.
    Others,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Probe => "small, to see what a sample needs",
            Self::Predicted => "predicted from samples of other shapes",
            Self::Measure => "to see how fast it is",
            Self::Fastest => "the fastest that fits",
            Self::Largest => "the largest that fits",
            Self::Corrected => "what was measured corrects the prediction",
            Self::BackOff => "memory ran out at a larger one",
            Self::Thrash => "the allocator emptied its cache again and again",
            Self::LessMemory => "less memory is free than before",
            Self::MoreMemory => "more memory is free than before",
            Self::Calm => "a larger one failed long ago, so it is tried again",
            Self::Remembered => "found by an earlier run",
            Self::Others => "other ranks take no more",
        })
    }
}

/// Decision on the size of micro-batches, and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Decision {
    /// Largest number of samples in a micro-batch.
    pub size: usize,
    /// Number of micro-batches run with this size, unless memory ran out before.
    pub micro_batches: usize,
    /// Reason for this size.
    pub why: Why,
    /// Predicted need, beyond the bytes in use before the step.
    pub predicted: Option<Bytes>,
    /// Measured need.
    pub measured: Option<Bytes>,
    /// Bytes that were free at the decision.
    pub available: Bytes,
    /// Whether memory ran out.
    pub failed: bool,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, why, predicted, measured, available, failed, .. } = self;
        write!(f, "micro-batches of {size} ({why}")?;
        if let Some(predicted) = predicted {
            write!(f, "; {predicted} expected")?;
        }
        match measured {
            _ if *failed => write!(f, "; memory ran out")?,
            Some(measured) => write!(f, "; {measured} needed")?,
            None => {}
        }
        write!(f, "; {available} free)")
    }
}

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
    /// True if the trial is timed.
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
