//! Logs of a training run that grow with every step: a table, and events for TensorBoard.
//!
//! Each line is in its file once its step is done. A resumed run cuts its logs back to the step that it resumes from,
//! so that they end like those of an uninterrupted run, except for timings. A log that can no longer be written, as
//! on a full disk, ends with its last whole line; the run reports this once and goes on without the log.

mod appended_file;
mod event_log;
mod step_log;
mod tensorboard;

use std::path::Path;

use anyhow::Result;
use brimful_report::Record;
use serde::Serialize;

pub(crate) use event_log::events_file;

use event_log::EventLog;
use step_log::StepLog;

/// Figures of one step.
#[derive(Debug)]
pub(crate) struct StepFigures<'a> {
    /// Number of the step over all epochs, from 1.
    pub(crate) step: usize,
    /// Number of its epoch, from 1.
    pub(crate) epoch: usize,
    /// Learning rate of the step.
    pub(crate) learning_rate: f64,
    pub(crate) record: &'a Record,
}

impl StepFigures<'_> {
    /// Returns the samples per second.
    fn samples_per_s(&self) -> f64 {
        self.record.samples as f64 / self.record.time.as_secs_f64()
    }
}

/// Results of a test; its fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct TestFigures {
    /// Step after which the test ran.
    pub(crate) step: usize,
    /// Epoch of that step.
    #[serde(skip)]
    pub(crate) epoch: usize,
    /// Mean loss of the test samples.
    #[serde(rename = "test_loss")]
    pub(crate) loss: f64,
    /// Share of right predictions, from 0 to 1.
    #[serde(rename = "test_accuracy")]
    pub(crate) accuracy: f64,
    /// True if its loss is lower than that of every test before.
    pub(crate) best: bool,
}

/// Requested logs.
#[derive(Debug, Default)]
pub(crate) struct LogFiles {
    table: Option<StepLog>,
    events: Option<EventLog>,
}

impl LogFiles {
    /// Opens a table in the file `table` and events in the folder `events`: new ones, or those of the run that
    /// resumes after step `resumed`.
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

    /// Logs a step that is done.
    pub(crate) fn step(&mut self, figures: &StepFigures<'_>) {
        self.table.iter_mut().for_each(|table| table.step(figures));
        self.events.iter_mut().for_each(|events| events.step(figures));
    }

    /// Logs a test that is done, unless the logs have it already from before an interruption.
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

    /// Makes a step with figures of its own.
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

    /// Makes the test after a step.
    pub(super) fn test(step: usize) -> TestFigures {
        TestFigures { step, epoch: 1 + step / 4, loss: 0.5, accuracy: 0.75, best: false }
    }
}
