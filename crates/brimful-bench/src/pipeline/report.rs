//! The rows of pipelines: speed beside what bubble and machine allow, memory, balance.

use std::fmt;

use anyhow::{Error, Result};
use brimful::Bytes;
use brimful::plan::PlanChoice;
use brimful::schedule::{Recompute, Schedule};
use brimful_cli::setting::ModelName;
use serde::Serialize;

use super::runner::Runner;
use crate::columns::{Columns, Speed};
use crate::journal::Journal;
use crate::times::StepTimes;
use crate::work::Workload;

/// The model on one thread.
#[derive(Debug, Serialize)]
pub(super) struct AloneRow {
    #[serde(flatten)]
    columns: Columns,
    micro_batches: usize,
    #[serde(flatten)]
    speed: Speed,
    stages: usize,
    schedule: Option<Schedule>,
    recompute: Option<Recompute>,
    ratio: f64,
    peak_bytes: Option<Bytes>,
}

/// A pipeline.
#[derive(Debug, Serialize)]
pub(super) struct PipelineRow {
    #[serde(flatten)]
    columns: Columns,
    micro_batches: usize,
    #[serde(flatten)]
    speed: Speed,
    stages: usize,
    schedule: Schedule,
    recompute: Recompute,
    balance: Vec<usize>,
    /// Speed over that of one thread in the same run.
    ratio: f64,
    /// The ratio that the bubble allows to stages of equal time.
    limit: f64,
    /// What the machine gives: as many copies as stages over as many times one.
    machine: f64,
    /// The ratio over limit times machine.
    of_limit: f64,
    /// The ratio that the stages' measured times allow: the balance's own limit.
    simulated: f64,
    /// The ratio over that times machine.
    of_balance: f64,
    /// What torchgpipe's authors measured on Tesla P40 cards, over one card without a pipeline.
    published_ratio: Option<f64>,
    /// Idle time over all time, in the step of the median time.
    bubble: Option<f64>,
    /// On the device that held the most.
    peak_bytes: Option<Bytes>,
    peaks: Vec<Option<Bytes>>,
}

/// A pipeline that cannot be built.
#[derive(Debug, Serialize)]
pub(super) struct NotBuiltRow {
    #[serde(flatten)]
    columns: Columns,
    micro_batches: usize,
    stages: usize,
    schedule: Schedule,
    recompute: Recompute,
    error: String,
}

/// Enters a row under the heading of its work.
fn enter(
    journal: &mut Journal,
    columns: &Columns,
    micro_batches: usize,
    text: &str,
    row: &impl Serialize,
) -> Result<()> {
    let Columns { model, shape, micro_batch, .. } = columns;
    let title = format!(
        "{model} {shape}, {micro_batches} micro-batches of {micro_batch}, one thread a stage"
    );
    let columns = format!(
        "  {:>6}  {:<26}{:<12}{:>11}{:>8}{:>8}{:>9}{:>9}{:>10}{:>12}{:>9}{:>9}{:>12}",
        "stages",
        "schedule",
        "recompute",
        "samples/s",
        "ratio",
        "limit",
        "balance",
        "machine",
        "of limit",
        "of balance",
        "bubble",
        "spread",
        "peak"
    );
    journal.enter_as(&title, &columns, text, row)
}

/// How many micro-batches there are.
fn micro_batches(work: &Workload) -> usize {
    work.batch / work.micro_batch
}

impl AloneRow {
    pub(super) fn new(work: &Workload, times: &StepTimes) -> Self {
        Self {
            columns: Columns::new("one thread", work),
            micro_batches: micro_batches(work),
            speed: Speed::new(work, times),
            stages: 1,
            schedule: None,
            recompute: None,
            ratio: 1.0,
            peak_bytes: None,
        }
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let Speed { samples_per_s, spread, .. } = &self.speed;
        let text = format!(
            "  {:>6}  {:<26}{samples_per_s:>11.2}{:>8.3}{:>64.1} %",
            "–",
            "one thread",
            1.0,
            100.0 * spread
        );
        enter(journal, &self.columns, self.micro_batches, &text, self)
    }
}

impl PipelineRow {
    pub(super) fn new(
        work: &Workload,
        runner: &Runner,
        stages: usize,
        alone: &StepTimes,
        machine: f64,
    ) -> Result<Self> {
        let (limit, simulated) = (runner.limit()?, runner.simulated());
        let ratio = alone.median() / runner.times.median();
        Ok(Self {
            columns: Columns::new("brimful", work),
            micro_batches: micro_batches(work),
            speed: Speed::new(work, &runner.times),
            stages,
            schedule: runner.row.choice.schedule,
            recompute: runner.row.choice.recompute,
            balance: runner.row.balance.sizes().to_vec(),
            ratio,
            limit,
            machine,
            of_limit: ratio / (limit * machine),
            simulated,
            of_balance: ratio / (simulated * machine),
            published_ratio: published(work.model, stages, runner.row.choice.schedule),
            bubble: runner.typical().and_then(|step| Some(step.timeline.as_ref()?.bubble())),
            peak_bytes: runner.peaks.iter().flatten().max().copied(),
            peaks: runner.peaks.clone(),
        })
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let Self { stages, schedule, recompute, ratio, limit, machine, simulated, .. } = self;
        let Self { of_limit, of_balance, .. } = self;
        let Speed { samples_per_s, spread, .. } = &self.speed;
        let percent = |part: f64| format!("{:.1} %", 100.0 * part);
        let text = format!(
            "  {stages:>6}  {schedule:<26}{recompute:<12}{samples_per_s:>11.2}{ratio:>8.3}\
             {limit:>8.3}{simulated:>9.3}{machine:>9.3}{of_limit:>10.3}{of_balance:>12.3}\
             {:>9}{:>9}{:>12}",
            self.bubble.map(percent).unwrap_or_default(),
            percent(*spread),
            self.peak_bytes.map(|peak| peak.to_string()).unwrap_or_default(),
        );
        enter(journal, &self.columns, self.micro_batches, &text, self)
    }
}

/// Theirs is GPipe, recomputed but for the last micro-batch.
fn published(model: ModelName, stages: usize, schedule: Schedule) -> Option<f64> {
    let ratios = match model {
        ModelName::Resnet101 => [0.74, 1.352, 2.181, 2.808],
        ModelName::UNet { blocks: 5, channels: 64 } => [0.858, 1.246, 2.352, 3.105],
        _ => return None,
    };
    let place = [1, 2, 4, 8].iter().position(|count| *count == stages)?;
    (schedule == Schedule::GPipe).then_some(ratios[place])
}

impl NotBuiltRow {
    pub(super) fn new(work: &Workload, choice: PlanChoice, stages: usize, error: Error) -> Self {
        let PlanChoice { schedule, recompute, .. } = choice;
        let (columns, error) = (Columns::new("brimful", work), format!("{error:#}"));
        let micro_batches = micro_batches(work);
        Self { columns, micro_batches, stages, schedule, recompute, error }
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let Self { stages, schedule, recompute, error, .. } = self;
        let text = format!("  {stages:>6}  {schedule:<26}{recompute:<12}  {error}");
        enter(journal, &self.columns, self.micro_batches, &text, self)
    }
}

impl fmt::Display for NotBuiltRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.schedule, self.error)
    }
}
