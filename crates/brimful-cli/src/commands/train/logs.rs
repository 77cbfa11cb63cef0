//! What a run tells its logs.

use anyhow::Result;
use brimful::report::Record;

use super::{TrainOptions, Trainer};
use crate::log_files::{LogFiles, StepFigures};

/// The logs that were asked for, from the step on that the run goes on from. Of several ranks, the
/// first has them.
pub(super) fn open(trainer: &Trainer, options: &TrainOptions) -> Result<LogFiles> {
    let files = &options.files;
    if !trainer.is_first() {
        return Ok(LogFiles::default());
    }
    let resumed = files.resume.as_ref().map(|_| trainer.steps_done());
    LogFiles::open(files.log.as_deref(), files.events.as_deref(), resumed)
}

/// What the step that was just taken came to.
pub(super) fn figures(step: &Record, learning_rate: f64, trainer: &Trainer) -> StepFigures {
    StepFigures {
        step: trainer.steps_done(),
        epoch: trainer.epoch + 1,
        loss: step.loss,
        learning_rate,
        samples_per_s: step.samples as f64 / step.time.as_secs_f64(),
        peak_bytes: step.peak(),
        micro_batch_size: step.micro_batch,
        retries: step.retries,
    }
}
