//! The rows of micro-batched training: speeds, and peaks of memory.

use anyhow::Result;
use brimful::Bytes;
use brimful_cli::setting::{ModelName, NumberType};
use serde::Serialize;

use super::contest::ContestantFigures;
use super::tuned::Tuning;
use crate::journal::Journal;
use crate::work::Workload;

/// A contestant's figures.
#[derive(Debug, Serialize)]
pub(super) struct SpeedRow {
    contestant: &'static str,
    #[serde(flatten)]
    work: WorkColumns,
    replay: bool,
    channels_last: bool,
    samples_per_s: f64,
    /// Speed over that of the hand-written loop in the same run.
    ratio: f64,
    /// Speed over that of the library with the mini-batch on the device; 1 hides every copy.
    ratio_to_resident: Option<f64>,
    /// (Longest − shortest) / median of the steps.
    spread: f64,
    seconds: Vec<f64>,
    /// Of the steps before, in which kernels are chosen and micro-batches captured.
    warm_up_seconds: Vec<f64>,
    peak_bytes: Option<Bytes>,
    loss: f64,
}

/// A mini-batch's peak.
#[derive(Debug, Serialize)]
pub(super) struct MemoryRow {
    contestant: &'static str,
    #[serde(flatten)]
    work: WorkColumns,
    micro_batches: usize,
    samples_per_s: f64,
    peak_bytes: Bytes,
    /// The mini-batch that it is compared with, in micro-batches.
    compared_with: Option<usize>,
    /// Its peak over that one's.
    ratio: Option<f64>,
}

/// The columns that say what was run.
#[derive(Debug, Serialize)]
struct WorkColumns {
    model: ModelName,
    shape: String,
    dtype: NumberType,
    batch: usize,
    micro_batch: usize,
    stages: usize,
    schedule: Option<&'static str>,
    recompute: Option<&'static str>,
}

impl SpeedRow {
    pub(super) fn new(
        work: &Workload,
        figures: &ContestantFigures,
        ratio: f64,
        ratio_to_resident: Option<f64>,
    ) -> Self {
        let ContestantFigures { contestant, warm_up, times, peak, loss } = figures;
        let Tuning { replay, channels_last } = contestant.tuning();
        Self {
            contestant: contestant.name(),
            work: WorkColumns::new(work),
            replay,
            channels_last,
            samples_per_s: work.batch as f64 / times.median(),
            ratio,
            ratio_to_resident,
            spread: times.spread(),
            seconds: times.0.clone(),
            warm_up_seconds: warm_up.clone(),
            peak_bytes: *peak,
            loss: *loss,
        }
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let title = format!("{}, mini-batch {}", self.work.title(), self.work.batch);
        let columns = format!(
            "  {:<32}{:>11}{:>8}{:>11}{:>10}{:>12}",
            "", "samples/s", "ratio", "streaming", "spread", "peak"
        );
        journal.write(&title, &columns, &self.text(), self)
    }

    fn text(&self) -> String {
        let peak = self.peak_bytes.map_or_else(String::new, |peak| peak.to_string());
        let hidden = self.ratio_to_resident.map_or_else(String::new, |r| format!("{r:.3}"));
        format!(
            "  {:<32}{:>11.1}{:>8.3}{hidden:>11}{:>8.1} %{peak:>12}",
            self.contestant,
            self.samples_per_s,
            self.ratio,
            self.spread * 100.0
        )
    }
}

impl MemoryRow {
    pub(super) fn new(
        work: &Workload,
        micro_batches: usize,
        samples_per_s: f64,
        peak_bytes: Bytes,
        compared_with: Option<usize>,
        ratio: Option<f64>,
    ) -> Self {
        Self {
            contestant: "brimful",
            work: WorkColumns::new(work),
            micro_batches,
            samples_per_s,
            peak_bytes,
            compared_with,
            ratio,
        }
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let columns =
            format!("  {:>13}{:>10}{:>12}{:>12}", "micro-batches", "samples", "samples/s", "peak");
        journal.write(&self.work.title(), &columns, &self.text(), self)
    }

    fn text(&self) -> String {
        let Self { micro_batches, samples_per_s, peak_bytes, .. } = self;
        let growth = match (self.ratio, self.compared_with) {
            (Some(ratio), Some(base)) => format!("{:+.2} % against {base}", (ratio - 1.0) * 100.0),
            _ => String::new(),
        };
        let samples = self.work.batch;
        format!(
            "  {micro_batches:>13}{samples:>10}{samples_per_s:>12.1}{peak_bytes:>12}   {growth}"
        )
    }
}

impl WorkColumns {
    fn new(work: &Workload) -> Self {
        Self {
            model: work.model,
            shape: work.shape(),
            dtype: work.dtype,
            batch: work.batch,
            micro_batch: work.micro_batch,
            stages: 1,
            schedule: None,
            recompute: None,
        }
    }

    /// What a table's heading says of its rows.
    fn title(&self) -> String {
        let Self { model, shape, dtype, micro_batch, .. } = self;
        format!("{} {shape}, {}, micro-batch {micro_batch}", model, dtype)
    }
}
