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
use brimful::report::Record;
use serde::Serialize;

pub(crate) use event_log::events_file;

use event_log::EventLog;
use step_log::StepLog;

/// What one step came to.
#[derive(Debug)]
pub(crate) struct StepFigures<'a> {
    /// Its number, from 1 on, over all epochs.
    pub(crate) step: usize,
    /// Its epoch, from 1 on.
    pub(crate) epoch: usize,
    /// How far it went.
    pub(crate) learning_rate: f64,
    pub(crate) record: &'a Record,
}

impl StepFigures<'_> {
    /// How fast it was.
    fn samples_per_s(&self) -> f64 {
        self.record.samples as f64 / self.record.time.as_secs_f64()
    }
}

/// What a test came to; its fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct TestFigures {
    /// The step after which it was made.
    pub(crate) step: usize,
    /// The epoch of that step.
    #[serde(skip)]
    pub(crate) epoch: usize,
    /// The mean loss of the test samples.
    #[serde(rename = "test_loss")]
    pub(crate) loss: f64,
    /// The share of right answers, from 0 to 1.
    #[serde(rename = "test_accuracy")]
    pub(crate) accuracy: f64,
    /// Whether no test before had so low a loss.
    pub(crate) best: bool,
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
    pub(crate) fn step(&mut self, figures: &StepFigures<'_>) {
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
    use std::time::Duration;

    use brimful::Bytes;

    use super::*;

    /// A step with figures of its own.
    pub(super) fn step(step: usize) -> StepFigures<'static> {
        let record = Box::leak(Box::new(Record {
            loss: 1.0 / step as f64,
            samples: 123_456,
            time: Duration::from_secs(100),
            peaks: vec![Some(Bytes(1 << 20))],
            micro_batch: 16,
            ..Record::default()
        }));
        StepFigures { step, epoch: 1 + step / 4, learning_rate: 1e-3, record }
    }

    /// The test after a step.
    pub(super) fn test(step: usize) -> TestFigures {
        TestFigures { step, epoch: 1 + step / 4, loss: 0.5, accuracy: 0.75, best: false }
    }
}
