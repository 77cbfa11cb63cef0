//! The turns of both backwards, and what they came to.

use anyhow::Result;
use brimful_torch::autograd::by_engine;
use serde::Serialize;
use tch::Device;

use super::stage::{HalvesSeconds, MiddleStage, WholeSeconds};
use crate::columns::Columns;
use crate::gradients::relative_difference;
use crate::times::StepTimes;
use crate::turns::TurnProgress;
use crate::work::Workload;

/// Turns before the first that counts: libraries choose their kernels in them, caches fill.
const WARM_UP: usize = 2;

/// A backward in halves beside the whole one.
#[derive(Debug, Serialize)]
pub(super) struct HalvesRow {
    #[serde(flatten)]
    columns: Columns,
    repeats: usize,
    forward_seconds: f64,
    whole_seconds: f64,
    /// Of the same whole backward, run by libtorch's engine.
    engine_seconds: f64,
    input_seconds: f64,
    weight_seconds: f64,
    /// Of both halves together, in turns of their own.
    halves_seconds: f64,
    /// Both halves over the whole.
    ratio: f64,
    /// (Longest − shortest) / median of the whole backward, and of both halves.
    whole_spread: f64,
    spread: f64,
    /// The length of the difference of all gradients over that of the whole backward's.
    gradient_difference: f64,
}

/// How often each backward has its turn.
pub(super) fn turns(repeats: usize) -> usize {
    WARM_UP + repeats
}

/// Lets both take turns.
pub(super) fn measure(
    work: &Workload,
    device: Device,
    repeats: usize,
    progress: &TurnProgress,
) -> Result<HalvesRow> {
    let title = format!("{} {} {}", work.model, work.dtype, work.micro_batch);
    progress.row(&title);
    let mut stage = MiddleStage::new(work, device)?;
    let (mut times, mut difference) = (BackwardTimes::default(), 0.0);
    for turn in 0..turns(repeats) {
        progress.turn(&title, "whole", turn, WARM_UP, repeats);
        let (engine, _) = by_engine(|| stage.whole())?;
        let (whole, expected) = stage.whole()?;
        progress.turn(&title, "in halves", turn, WARM_UP, repeats);
        let (halves, found) = stage.halves()?;
        if turn < WARM_UP {
            difference = relative_difference(&expected, &found, work.dtype)?;
        } else {
            times.engine.push(engine.backward);
            times.push(&whole, &halves);
        }
        progress.advance(1);
    }
    progress.done();
    Ok(times.row(work, difference))
}

/// The seconds of all turns that count.
#[derive(Debug, Default)]
struct BackwardTimes {
    forward: StepTimes,
    whole: StepTimes,
    engine: StepTimes,
    input: StepTimes,
    weight: StepTimes,
    halves: StepTimes,
}

impl BackwardTimes {
    fn push(&mut self, whole: &WholeSeconds, halves: &HalvesSeconds) {
        self.forward.push(whole.forward);
        self.forward.push(halves.forward);
        self.whole.push(whole.backward);
        self.input.push(halves.input);
        self.weight.push(halves.weight);
        self.halves.push(halves.input + halves.weight);
    }

    fn row(&self, work: &Workload, gradient_difference: f64) -> HalvesRow {
        let (whole, halves) = (self.whole.median(), self.halves.median());
        HalvesRow {
            columns: Columns::new("brimful", work),
            repeats: self.whole.0.len(),
            forward_seconds: self.forward.median(),
            whole_seconds: whole,
            engine_seconds: self.engine.median(),
            input_seconds: self.input.median(),
            weight_seconds: self.weight.median(),
            halves_seconds: halves,
            ratio: halves / whole,
            whole_spread: self.whole.spread(),
            spread: self.halves.spread(),
            gradient_difference,
        }
    }
}
