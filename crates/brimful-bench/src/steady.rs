//! Consecutive steps including their updates, which may run during later steps.

use std::time::Instant;

use anyhow::{Context, Result};
use brimful::StepReport;
use serde::Serialize;

use crate::times::StepTimes;
use crate::turns::TurnProgress;
use crate::work::Samples;

/// The first steps create gradients, the optimizer's state and CUDA graphs.
const WARM_UP: usize = 5;

/// Returns the number of steps that a contestant runs.
pub(crate) fn steps(repeats: usize) -> usize {
    WARM_UP + repeats
}

/// Learning rate of AdamW in such steps.
pub(crate) const LEARNING_RATE: f64 = 1e-4;

/// Training whose steps are measured.
pub(crate) trait SteadyTraining {
    /// Runs forward and backward over a mini-batch, until the loss is read.
    fn backward(&mut self, batch: &Samples) -> Result<StepReport>;

    /// Runs the update, or starts it.
    fn update(&mut self) -> Result<()>;

    /// Waits until the last update is complete. Earlier updates may overlap with the next step; the last one cannot.
    fn wait(&mut self) -> Result<()>;
}

/// Figures of consecutive steps including their updates.
#[derive(Debug, Serialize)]
pub(crate) struct SteadySteps {
    /// Mean seconds of a step; a mean, because an update may run within the next step.
    pub(crate) seconds: f64,
    pub(crate) seconds_backward: f64,
    pub(crate) seconds_last_update: f64,
    /// Loss of the very first step.
    #[serde(skip)]
    pub(crate) first_loss: f64,
    #[serde(skip)]
    pub(crate) last: StepReport,
}

impl SteadySteps {
    /// Runs this many steps of the named contestant over a mini-batch, after a warm-up.
    pub(crate) fn measure<T: SteadyTraining + ?Sized>(
        contestant: &mut T,
        batch: &Samples,
        repeats: usize,
        (name, progress): (&str, &TurnProgress),
    ) -> Result<Self> {
        let (mut times, mut backwards) = (StepTimes::default(), StepTimes::default());
        let (mut first_loss, mut last) = (None, None);
        for turn in 0..steps(repeats) {
            progress.turn(name, "steps", turn, WARM_UP, repeats);
            let start = Instant::now();
            let step = contestant.backward(batch)?;
            backwards.push_if(turn >= WARM_UP, start.elapsed().as_secs_f64());
            contestant.update()?;
            times.push_if(turn >= WARM_UP, start.elapsed().as_secs_f64());
            first_loss.get_or_insert(step.loss);
            last = Some(step);
            progress.advance(1);
        }
        let start = Instant::now();
        contestant.wait()?;
        Ok(Self {
            seconds: times.0.iter().sum::<f64>() / times.0.len() as f64,
            seconds_backward: backwards.median(),
            seconds_last_update: start.elapsed().as_secs_f64(),
            first_loss: first_loss.context("no step")?,
            last: last.context("no step")?,
        })
    }
}
