//! What was decided on the user's behalf, and why, for reports and log lines.

use std::fmt;

use serde::Serialize;

use crate::bytes::Bytes;

/// Why a size was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Why {
    /// Small, to see what a sample needs.
    Probe,
    /// From what samples of other shapes needed.
    Predicted,
    /// To see how fast it is.
    Measure,
    /// The fastest of those that fit.
    Fastest,
    /// The largest that fits.
    Largest,
    /// What was measured since corrects the prediction.
    Corrected,
    /// Memory ran out at a larger one.
    BackOff,
    /// The allocator had to empty its cache at a larger one, step after step.
    Thrash,
    /// Less memory is free than before.
    LessMemory,
    /// More memory is free than before.
    MoreMemory,
    /// A larger one had failed, but all has been calm since.
    Calm,
    /// An earlier run has found it.
    Remembered,
    /// Other ranks take no more.
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

/// One decision on the size of micro-batches, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Decision {
    /// At most so many samples in a micro-batch.
    pub size: usize,
    /// So many micro-batches were run by it, unless memory ran out before.
    pub micro_batches: usize,
    /// Why.
    pub why: Why,
    /// What it was expected to need, beside what was in use before the step.
    pub predicted: Option<Bytes>,
    /// What it needed.
    pub measured: Option<Bytes>,
    /// What was free for it.
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
