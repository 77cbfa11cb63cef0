//! Row of a model and a limit: sizes found by `auto` and `largest`, beside the best possible ones.

use anyhow::Result;
use brimful::{Bytes, MicroBatches, StepReport};
use brimful_cli::exit::Exit;
use brimful_cli::setting::{ModelName, NumberType};
use serde::Serialize;

use super::subject::{Built, LimitedWork};
use super::trials;
use crate::times::StepTimes;
use crate::turns::TurnProgress;

/// Steps in which `largest` or `auto` finds its size.
const LARGEST_STEPS: usize = 4;
const FASTEST_STEPS: usize = 10;
/// Steps in which the memory format is found as well.
const ORDER_STEPS: usize = 20;
/// Steps measured afterwards.
const STEADY_STEPS: usize = 5;

/// Row of the table.
#[derive(Debug, Serialize)]
pub(super) struct AutoRow {
    contestant: &'static str,
    model: ModelName,
    shape: String,
    dtype: NumberType,
    batch: usize,
    limit_bytes: Bytes,
    #[serde(flatten)]
    outcome: AutoOutcome,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum AutoOutcome {
    Measured(AutoFigures),
    DoesNotFit { error: String },
}

#[derive(Debug, Serialize)]
struct AutoFigures {
    largest: Option<Largest>,
    #[serde(flatten)]
    fastest: Fastest,
    best: Option<Best>,
}

/// Result of `MicroBatches::Largest`.
#[derive(Debug, Serialize)]
struct Largest {
    size: usize,
    /// Largest size that fits, by trial.
    feasible: usize,
    failed: usize,
    /// Time to find the size, as a number of steps with that size.
    extra_steps: f64,
}

/// Result of `MicroBatches::Auto`.
#[derive(Debug, Serialize)]
struct Fastest {
    micro_batch: usize,
    failed: usize,
    first_step_s: f64,
    samples_per_s: f64,
    spread: f64,
    /// Rate, divided by the rate of the same size as a fixed size. The steps of both alternate.
    ratio_to_fixed: Option<f64>,
    peak_bytes: Option<Bytes>,
}

/// Fastest fixed size.
#[derive(Debug, Serialize)]
struct Best {
    size: usize,
    /// Rate of `auto`, divided by the rate of this size. The steps of both alternate.
    ratio: f64,
}

impl AutoRow {
    pub(super) fn measure(
        subject: &LimitedWork,
        steps_only: bool,
        progress: &TurnProgress,
    ) -> Result<Self> {
        let outcome = match AutoFigures::measure(subject, steps_only, progress) {
            Err(error) if Exit::of(&error) == Exit::DoesNotFit => {
                AutoOutcome::DoesNotFit { error: error.to_string() }
            }
            figures => AutoOutcome::Measured(figures?),
        };
        let work = &subject.work;
        Ok(Self {
            contestant: if subject.cuda_graphs { "brimful, replay" } else { "brimful" },
            model: work.model,
            shape: work.shape(),
            dtype: work.dtype,
            batch: work.batch,
            limit_bytes: subject.limit,
            outcome,
        })
    }

    pub(super) fn fits(&self) -> bool {
        matches!(self.outcome, AutoOutcome::Measured(_))
    }
}

impl AutoFigures {
    fn measure(subject: &LimitedWork, steps_only: bool, progress: &TurnProgress) -> Result<Self> {
        let title = subject.title();
        let (mut largest, mut best) = (None, None);
        if !steps_only {
            let feasible = trials::largest(subject, progress)?;
            best = Some(trials::fastest(subject, feasible, progress)?);
            progress.row(&format!("{title}: largest"));
            largest = Some(find_largest(subject, feasible)?);
        }
        progress.row(&format!("{title}: auto"));
        let (fastest, best) = fastest(subject, best)?;
        Ok(Self { largest, fastest, best })
    }
}

/// Runs `auto`, then alternates its steps with those of the same fixed size and of the best one.
fn fastest(subject: &LimitedWork, best: Option<usize>) -> Result<(Fastest, Option<Best>)> {
    let mut built = subject.build(MicroBatches::Auto)?;
    let (mut failed, first_step_s) = learn(&mut built, subject.cuda_graphs)?;
    let [mut times, mut same, mut of_best] = [(); 3].map(|()| StepTimes::default());
    let (mut micro_batch, mut peak_bytes) = (0, None);
    for _ in 0..STEADY_STEPS {
        let (seconds, step) = built.step()?;
        times.push(seconds);
        failed += step.retries;
        (micro_batch, peak_bytes) = (size(&step), step.peak());
        // Captured graphs hold memory that steps of a fixed size would need.
        if !subject.cuda_graphs {
            same.push(built.step_of(micro_batch)?);
        }
        if let Some(best) = best {
            of_best.push(built.step_of(best)?);
        }
    }
    let fastest = Fastest {
        micro_batch,
        failed,
        first_step_s,
        samples_per_s: subject.work.batch as f64 / times.median(),
        spread: times.spread(),
        ratio_to_fixed: (!subject.cuda_graphs).then(|| same.median() / times.median()),
        peak_bytes,
    };
    let best = best.map(|size| Best { size, ratio: of_best.median() / times.median() });
    Ok((fastest, best))
}

/// Runs the steps in which `auto` finds its size; returns the number of failed attempts and the seconds of the
/// first step.
fn learn(built: &mut Built<'_>, cuda_graphs: bool) -> Result<(usize, f64)> {
    let steps = if cuda_graphs { ORDER_STEPS } else { FASTEST_STEPS };
    let (first_step_s, step) = built.step()?;
    let mut failed = step.retries;
    for _ in 1..steps {
        failed += built.step()?.1.retries;
    }
    Ok((failed, first_step_s))
}

/// Runs `largest`. Its extra time is the difference from the same number of first steps with the size that it
/// found.
fn find_largest(subject: &LimitedWork, feasible: usize) -> Result<Largest> {
    let mut built = subject.build(MicroBatches::Largest)?;
    let (mut total, mut failed, mut found) = (0.0, 0, 0);
    for _ in 0..LARGEST_STEPS {
        let (seconds, step) = built.step()?;
        total += seconds;
        failed += step.retries;
        found = size(&step);
    }
    drop(built);
    let mut given = subject.build(MicroBatches::Samples(found))?;
    for _ in 0..LARGEST_STEPS {
        total -= given.step()?.0;
    }
    let extra_steps = total / given.median(STEADY_STEPS)?;
    Ok(Largest { size: found, feasible, failed, extra_steps })
}

/// Returns the size that a step ended with.
fn size(step: &StepReport) -> usize {
    step.decisions.last().map_or(0, |decision| decision.size)
}
