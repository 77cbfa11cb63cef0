//! Contest of both backwards, and its results.

use anyhow::Result;
use brimful_torch::autograd::by_engine;
use serde::Serialize;
use tch::Device;

use super::stage::{MiddleStage, SplitSeconds, WholeSeconds};
use crate::columns::Columns;
use crate::gradients::relative_difference;
use crate::timed::{WARM_UP, turns};
use crate::times::StepTimes;
use crate::turns::TurnProgress;
use crate::work::Workload;

/// Figures of a split backward beside the whole one.
#[derive(Debug, Serialize)]
pub(super) struct SplitBackwardRow {
    #[serde(flatten)]
    columns: Columns,
    repeats: usize,
    forward_seconds: f64,
    whole_seconds: f64,
    /// Seconds of the same whole backward on libtorch's engine.
    engine_seconds: f64,
    input_seconds: f64,
    weight_seconds: f64,
    /// Seconds of both parts of the split backward together, measured on their own.
    split_seconds: f64,
    /// Seconds of the split backward, divided by those of the whole one.
    ratio: f64,
    /// (Longest − shortest) / median of the whole backward, and of the split one.
    whole_spread: f64,
    spread: f64,
    /// Norm of the difference of all gradients, divided by the norm of the whole backward's.
    gradient_difference: f64,
}

/// Alternates both backwards.
pub(super) fn measure(
    work: &Workload,
    device: Device,
    repeats: usize,
    progress: &TurnProgress,
) -> Result<SplitBackwardRow> {
    let title = format!("{} {} {}", work.model, work.dtype, work.micro_batch);
    progress.row(&title);
    let mut stage = MiddleStage::new(work, device)?;
    let (mut measured, mut difference) = (Vec::new(), 0.0);
    for turn in 0..turns(repeats) {
        progress.turn(&title, "whole", turn, WARM_UP, repeats);
        let (engine, _) = by_engine(|| stage.whole())?;
        let (whole, expected) = stage.whole()?;
        progress.turn(&title, "split", turn, WARM_UP, repeats);
        let (split, found) = stage.split()?;
        if turn < WARM_UP {
            difference = relative_difference(&expected, &found, work.dtype)?;
        } else {
            measured.push(BackwardTurn { engine, whole, split });
        }
        progress.advance(1);
    }
    progress.done();
    Ok(row(work, &measured, difference))
}

/// Seconds of a turn that counts.
struct BackwardTurn {
    engine: WholeSeconds,
    whole: WholeSeconds,
    split: SplitSeconds,
}

fn row(work: &Workload, turns: &[BackwardTurn], gradient_difference: f64) -> SplitBackwardRow {
    let of = |part: fn(&BackwardTurn) -> f64| StepTimes(turns.iter().map(part).collect());
    let forwards = turns.iter().flat_map(|turn| [turn.whole.forward, turn.split.forward]);
    let whole = of(|turn| turn.whole.backward);
    let split = of(|turn| turn.split.input + turn.split.weight);
    SplitBackwardRow {
        columns: Columns::new("brimful", work),
        repeats: turns.len(),
        forward_seconds: StepTimes(forwards.collect()).median(),
        whole_seconds: whole.median(),
        engine_seconds: of(|turn| turn.engine.backward).median(),
        input_seconds: of(|turn| turn.split.input).median(),
        weight_seconds: of(|turn| turn.split.weight).median(),
        split_seconds: split.median(),
        ratio: split.median() / whole.median(),
        whole_spread: whole.spread(),
        spread: split.spread(),
        gradient_difference,
    }
}
