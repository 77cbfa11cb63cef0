//! What an epoch has come to, step by step.

use std::time::Duration;

use brimful::Bytes;
use brimful::auto::Decision;
use brimful::report::Record;

/// What an epoch has come to so far.
#[derive(Debug, Default)]
pub(super) struct Running {
    /// Steps that are done.
    pub(super) steps: usize,
    /// The mean loss of all its samples, as far as it is known.
    pub(super) loss: f64,
    pub(super) peak: Bytes,
    pub(super) retries: usize,
    /// What changed about an automatic size, and why.
    pub(super) decisions: Vec<Decision>,
    /// What this process has trained on, and how long it took.
    samples: usize,
    time: Duration,
}

impl Running {
    /// So many steps, with such a part of the loss, of another run.
    pub(super) fn going_on(steps: usize, loss: f64) -> Self {
        Self { steps, loss, ..Self::default() }
    }

    /// One more step, on such a share of the epoch's samples, that took so long with all around it.
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

    /// How fast it is; 0 where no step was run.
    pub(super) fn samples_per_s(&self) -> f64 {
        if self.samples == 0 { 0.0 } else { self.samples as f64 / self.time.as_secs_f64() }
    }

    /// The automatic size that was taken last.
    pub(super) fn size(&self) -> Option<usize> {
        self.decisions.last().map(|decision| decision.size)
    }
}
