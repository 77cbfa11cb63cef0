//! Logs of a training run that grow with every step: a table, and events for TensorBoard.
//!
//! The entry of a step is in the file as soon as the step is done. A resumed run cuts its logs back to the step
//! that it resumes from. So its finished logs equal the logs of an uninterrupted run, except for timings. If a log
//! can no longer be written, as on a full disk, the file ends with its last whole entry. The run reports the error
//! once and goes on without the log.

mod appended_file;
mod event_log;
mod step_log;
mod tensorboard;

use std::path::Path;

use anyhow::Result;
use brimful_report::Record;
use serde::Serialize;

pub(crate) use event_log::events_file;

use crate::exit::wrong_use;
use appended_file::AppendedFile;
use event_log::Events;
use std::marker::PhantomData;
use step_log::StepTable;

/// Figures of one step.
#[derive(Debug)]
pub(crate) struct StepFigures<'a> {
    /// Number of the step over all epochs, from 1.
    pub(crate) step: usize,
    /// Number of the step's epoch, from 1.
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
    /// True if the test's loss is lower than the loss of every earlier test.
    pub(crate) best: bool,
}

/// Requested logs.
#[derive(Debug)]
pub(crate) struct LogFiles {
    table: Option<Log<StepTable>>,
    events: Option<Log<Events>>,
}

impl LogFiles {
    /// Opens a table in the file `table` and events in the folder `events`. If a run resumes after step `resumed`,
    /// opens the logs that the run already has; else begins new logs.
    pub(crate) fn open(
        table: Option<&Path>,
        events: Option<&Path>,
        resumed: Option<usize>,
    ) -> Result<Self> {
        Ok(Self {
            table: table.map(|path| Log::open(path, resumed)).transpose()?,
            events: events.map(|folder| event_log::open(folder, resumed)).transpose()?,
        })
    }

    /// Logs a step that is done.
    pub(crate) fn step(&mut self, figures: &StepFigures<'_>) {
        self.table.iter_mut().for_each(|table| table.step(figures));
        self.events.iter_mut().for_each(|events| events.step(figures));
    }

    /// Logs a test that is done. A resumed run can repeat a test from before the interruption; the logs keep only
    /// the first entry of such a test.
    pub(crate) fn test(&mut self, figures: &TestFigures) {
        self.table.iter_mut().for_each(|table| table.test(figures));
        self.events.iter_mut().for_each(|events| events.test(figures));
    }
}

/// Format of a log.
trait LogFormat {
    /// Returns the bytes that every log begins with.
    fn beginning() -> Vec<u8>;

    /// Returns the part of an earlier log that belongs to the steps up to `last`, or none if the log has no entry
    /// yet. Fails if the bytes are no log in this format.
    fn kept(bytes: &[u8], last: usize) -> Result<Option<KeptLog>, &'static str>;

    fn step(figures: &StepFigures<'_>) -> Vec<u8>;

    fn test(figures: &TestFigures) -> Vec<u8>;
}

/// Part of an earlier log that a resumed run keeps.
#[derive(Debug)]
struct KeptLog {
    bytes: usize,
    /// Step of the last test in the kept part.
    tested: Option<usize>,
}

/// A log in one format.
#[derive(Debug)]
struct Log<F> {
    file: AppendedFile,
    /// Step of the last test in the log.
    tested: Option<usize>,
    format: PhantomData<F>,
}

impl<F: LogFormat> Log<F> {
    /// Opens a new log. If a run resumes after step `resumed`, opens the log that the run already has, and drops
    /// the entries of later steps.
    fn open(path: &Path, resumed: Option<usize>) -> Result<Self> {
        let Some(last) = resumed else { return Ok(Self::begun(AppendedFile::empty(path)?)) };
        let (mut file, bytes) = AppendedFile::existing(path)?;
        let kept = F::kept(&bytes, last);
        let kept = kept.map_err(|reason| wrong_use(format!("{} {reason}", path.display())))?;
        file.cut_back(kept.as_ref().map_or(0, |kept| kept.bytes))?;
        Ok(match kept {
            Some(KeptLog { tested, .. }) => Self { file, tested, format: PhantomData },
            None => Self::begun(file),
        })
    }

    fn begun(mut file: AppendedFile) -> Self {
        file.append(&F::beginning());
        Self { file, tested: None, format: PhantomData }
    }

    /// Adds a step.
    fn step(&mut self, figures: &StepFigures<'_>) {
        self.file.append(&F::step(figures));
    }

    /// Adds a test, unless the log already has it.
    fn test(&mut self, figures: &TestFigures) {
        if self.tested.replace(figures.step) != Some(figures.step) {
            self.file.append(&F::test(figures));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use brimful::Bytes;

    use super::*;

    /// Makes a step whose figures depend on its number.
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
