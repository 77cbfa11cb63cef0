//! The rows of pipelines: speed beside what bubble and machine allow, memory, balance.

use anyhow::Result;
use brimful::Bytes;
use brimful::schedule::{Recompute, Schedule};
use serde::Serialize;

use super::super::journal::Journal;
use super::super::times::Times;
use super::super::work::{Dtype, ModelName, Work, name};
use super::runner::Runner;

/// The columns that say what was run.
#[derive(Debug, Serialize)]
struct Columns {
    contestant: &'static str,
    model: ModelName,
    shape: String,
    dtype: Dtype,
    batch: usize,
    micro_batch: usize,
    micro_batches: usize,
    samples_per_s: f64,
    /// (Longest − shortest) / median of the steps.
    spread: f64,
    seconds: Vec<f64>,
}

/// The model on one thread.
#[derive(Debug, Serialize)]
pub(super) struct AloneRow {
    #[serde(flatten)]
    columns: Columns,
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
    /// The ratio that the stages' measured times promise.
    simulated: f64,
    /// Idle time over all time, in the step of the median time.
    bubble: Option<f64>,
    /// On the device that held the most.
    peak_bytes: Option<Bytes>,
    peaks: Vec<Option<Bytes>>,
}

impl Columns {
    fn new(contestant: &'static str, work: &Work, times: &Times) -> Self {
        Self {
            contestant,
            model: work.model,
            shape: work.shape(),
            dtype: work.dtype,
            batch: work.batch,
            micro_batch: work.micro_batch,
            micro_batches: work.batch / work.micro_batch,
            samples_per_s: work.batch as f64 / times.median(),
            spread: times.spread(),
            seconds: times.0.clone(),
        }
    }

    fn enter(&self, journal: &mut Journal, text: &str, row: &impl Serialize) -> Result<()> {
        let Self { model, shape, micro_batch, micro_batches, .. } = self;
        let title = format!(
            "{} {shape}, {micro_batches} micro-batches of {micro_batch}, one thread a stage",
            name(model)
        );
        let columns = format!(
            "  {:>6}  {:<14}{:<12}{:>11}{:>8}{:>7}{:>9}{:>10}{:>11}{:>9}{:>9}{:>12}",
            "stages",
            "schedule",
            "recompute",
            "samples/s",
            "ratio",
            "limit",
            "machine",
            "of limit",
            "simulated",
            "bubble",
            "spread",
            "peak"
        );
        journal.write(&title, &columns, text, row)
    }
}

impl AloneRow {
    pub(super) fn new(work: &Work, times: &Times) -> Self {
        let columns = Columns::new("one thread", work, times);
        let (schedule, recompute, peak_bytes) = (None, None, None);
        Self { columns, stages: 1, schedule, recompute, ratio: 1.0, peak_bytes }
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let Columns { samples_per_s, spread, .. } = &self.columns;
        let text = format!(
            "  {:>6}  {:<26}{samples_per_s:>11.2}{:>8.3}{:>54.1} %",
            "–",
            "one thread",
            1.0,
            100.0 * spread
        );
        self.columns.enter(journal, &text, self)
    }
}

impl PipelineRow {
    pub(super) fn new(
        work: &Work,
        runner: &Runner,
        stages: usize,
        alone: &Times,
        machine: f64,
    ) -> Result<Self> {
        let limit = runner.limit()?;
        let ratio = alone.median() / runner.times.median();
        Ok(Self {
            columns: Columns::new("brimful", work, &runner.times),
            stages,
            schedule: runner.row.choice.schedule,
            recompute: runner.row.choice.recompute,
            balance: runner.row.balance.sizes().to_vec(),
            ratio,
            limit,
            machine,
            of_limit: ratio / (limit * machine),
            simulated: runner.simulated(),
            bubble: runner.typical().map(|step| step.bubble()),
            peak_bytes: runner.peaks.iter().flatten().max().copied(),
            peaks: runner.peaks.clone(),
        })
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let Self {
            stages, schedule, recompute, ratio, limit, machine, of_limit, simulated, ..
        } = self;
        let Columns { samples_per_s, spread, .. } = &self.columns;
        let percent = |part: f64| format!("{:.1} %", 100.0 * part);
        let text = format!(
            "  {stages:>6}  {schedule:<14}{recompute:<12}{samples_per_s:>11.2}{ratio:>8.3}\
             {limit:>7.2}{machine:>9.3}{of_limit:>10.3}{simulated:>11.3}{:>9}{:>9}{:>12}",
            self.bubble.map(percent).unwrap_or_default(),
            percent(*spread),
            self.peak_bytes.map(|peak| peak.to_string()).unwrap_or_default(),
        );
        self.columns.enter(journal, &text, self)
    }
}
