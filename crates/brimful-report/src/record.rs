//! Step as a recorder sees it, on one device, in replicas or in a pipeline.

use std::time::Duration;

use brimful::auto::Decision;
use brimful::{StepReport, Timeline};
use brimful_plan::bytes::Bytes;

/// Result of one step. Every kind of step converts into it.
#[derive(Debug, Default)]
pub struct Record {
    /// Loss of the mini-batch.
    pub loss: f64,
    /// Number of samples in the mini-batch.
    pub samples: usize,
    /// Size of the largest micro-batch.
    pub micro_batch: usize,
    /// Duration of forward and backward, and of any work that the caller adds.
    pub time: Duration,
    /// Peak memory in use on each device, where it is counted.
    pub peaks: Vec<Option<Bytes>>,
    /// Decisions of the automatic size.
    pub decisions: Vec<Decision>,
    /// Number of retries after running out of memory.
    pub retries: usize,
    /// Actions of a pipeline's step.
    pub timeline: Option<Timeline>,
}

impl Record {
    /// Returns the largest peak of all devices.
    #[must_use]
    pub fn peak(&self) -> Bytes {
        self.peaks.iter().flatten().max().copied().unwrap_or_default()
    }

    /// Returns the rate in samples per second.
    pub(super) fn rate(&self) -> f64 {
        self.samples as f64 / self.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

impl<O> From<StepReport<O>> for Record {
    fn from(step: StepReport<O>) -> Self {
        Self {
            loss: step.loss,
            samples: step.samples,
            micro_batch: step.sizes.iter().max().copied().unwrap_or(0),
            time: step.time,
            peaks: step.peaks,
            decisions: step.decisions,
            retries: step.retries,
            timeline: step.timeline,
        }
    }
}
