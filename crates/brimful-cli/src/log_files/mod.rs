//! What a training run says of every step, in files that grow with it: a table, and TensorBoard's
//! events.
//!
//! Each line is in the file as soon as its step is done. A run that goes on from a saved one cuts its
//! logs back to the step it goes on from, so that it ends in the files of an undisturbed run, but for
//! what depends on time. A log that can no longer be written, as on a full disk, ends with its last
//! whole line; this is said once, and the run goes on without it.

mod appended_file;
mod event_log;
mod step_log;
mod tensorboard;

use std::path::Path;

use anyhow::Result;
use brimful::Bytes;

use event_log::EventLog;
use step_log::StepLog;

/// What one step came to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StepFigures {
    /// Its number, from 1 on, over all epochs.
    pub(crate) step: usize,
    /// Its epoch, from 1 on.
    pub(crate) epoch: usize,
    /// The mini-batch's loss.
    pub(crate) loss: f64,
    /// How far it went.
    pub(crate) learning_rate: f64,
    /// How fast it was.
    pub(crate) samples_per_s: f64,
    /// The most memory in use on any device.
    pub(crate) peak_bytes: Bytes,
    /// The most samples in a micro-batch.
    pub(crate) micro_batch_size: usize,
    /// How often it was run again because memory had run out.
    pub(crate) retries: usize,
}

/// What a test came to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TestFigures {
    /// The step after which it was made.
    pub(crate) step: usize,
    /// The epoch of that step.
    pub(crate) epoch: usize,
    /// The mean loss of the test samples.
    pub(crate) loss: f64,
    /// The share of right answers, from 0 to 1.
    pub(crate) accuracy: f64,
}

/// The logs that were asked for.
#[derive(Debug, Default)]
pub(crate) struct LogFiles {
    table: Option<StepLog>,
    events: Option<EventLog>,
}

impl LogFiles {
    /// A table in the file `table`, and events in the folder `events`: new ones, or those of the run
    /// that goes on after step `resumed`.
    pub(crate) fn open(
        table: Option<&Path>,
        events: Option<&Path>,
        resumed: Option<usize>,
    ) -> Result<Self> {
        Ok(Self {
            table: table.map(|path| StepLog::open(path, resumed)).transpose()?,
            events: events.map(|folder| EventLog::open(folder, resumed)).transpose()?,
        })
    }

    /// A step is done.
    pub(crate) fn step(&mut self, figures: &StepFigures) {
        self.table.iter_mut().for_each(|table| table.step(figures));
        self.events.iter_mut().for_each(|events| events.step(figures));
    }

    /// A test is done. One that the logs have already, made before the run was broken off, is not
    /// written twice.
    pub(crate) fn test(&mut self, figures: &TestFigures) {
        self.table.iter_mut().for_each(|table| table.test(figures));
        self.events.iter_mut().for_each(|events| events.test(figures));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step with figures of its own.
    pub(super) fn step(step: usize) -> StepFigures {
        StepFigures {
            step,
            epoch: 1 + step / 4,
            loss: 1.0 / step as f64,
            learning_rate: 1e-3,
            samples_per_s: 1234.56,
            peak_bytes: Bytes(1 << 20),
            micro_batch_size: 16,
            retries: 0,
        }
    }

    /// The test after a step.
    pub(super) fn test(step: usize) -> TestFigures {
        TestFigures { step, epoch: 1 + step / 4, loss: 0.5, accuracy: 0.75 }
    }
}
