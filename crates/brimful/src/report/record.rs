//! What one step is to a recorder, on one device, in replicas or in a pipeline.

use std::time::Duration;

use crate::auto::Decision;
use crate::bytes::Bytes;
use crate::step::{Step, Timeline};

/// What one step came to. Every kind of step turns into one.
#[derive(Debug, Default)]
pub struct Record {
    /// The mini-batch's loss.
    pub loss: f64,
    /// Samples in the mini-batch.
    pub samples: usize,
    /// The most samples in a micro-batch.
    pub micro_batch: usize,
    /// How long it took: forward and backward, and what else the caller adds.
    pub time: Duration,
    /// The most memory in use on each device, where it is counted.
    pub peaks: Vec<Option<Bytes>>,
    /// What was decided about an automatic size.
    pub decisions: Vec<Decision>,
    /// How often it was run again because memory had run out.
    pub retries: usize,
    /// Its actions, of a pipeline.
    pub timeline: Option<Timeline>,
}

impl Record {
    /// The most memory in use on any device.
    #[must_use]
    pub fn peak(&self) -> Bytes {
        self.peaks.iter().flatten().max().copied().unwrap_or_default()
    }

    /// Samples a second.
    pub(super) fn rate(&self) -> f64 {
        self.samples as f64 / self.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

impl<O> From<Step<O>> for Record {
    fn from(step: Step<O>) -> Self {
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
