//! Running totals of an epoch, step by step.

use std::time::Duration;

use brimful::Bytes;
use brimful::auto::Decision;
use brimful_report::Record;

/// Totals of an epoch so far.
#[derive(Debug, Default)]
pub(super) struct Running {
    /// Steps done.
    pub(super) steps: usize,
    /// Part of the epoch's mean loss that its steps have contributed so far.
    pub(super) loss: f64,
    pub(super) peak: Bytes,
    pub(super) retries: usize,
    /// Changes of an automatic size, with their reasons.
    pub(super) decisions: Vec<Decision>,
    /// Samples that this process has trained on, and the time that it took.
    samples: usize,
    time: Duration,
}

impl Running {
    /// Continues the epoch of another run, after `steps` steps and with their part of the loss.
    pub(super) fn going_on(steps: usize, loss: f64) -> Self {
        Self { steps, loss, ..Self::default() }
    }

    /// Adds a step. `share` is the step's share of the epoch's samples, and `time` its whole time.
    pub(super) fn add(&mut self, step: &Record, share: f64, time: Duration) {
        self.steps += 1;
        self.samples += step.samples;
        self.time += time;
        self.loss += step.loss * share;
        self.peak = self.peak.max(step.peak());
        self.retries += step.retries;
        for decision in &step.decisions {
            let same = |last: &Decision| (last.size, last.why) == (decision.size, decision.why);
            if !self.decisions.last().is_some_and(same) {
                self.decisions.push(decision.clone());
            }
        }
    }

    /// Returns the samples per second; 0 if no step has run.
    pub(super) fn samples_per_s(&self) -> f64 {
        if self.samples == 0 { 0.0 } else { self.samples as f64 / self.time.as_secs_f64() }
    }

    /// Returns the last automatic size taken.
    pub(super) fn size(&self) -> Option<usize> {
        self.decisions.last().map(|decision| decision.size)
    }
}
