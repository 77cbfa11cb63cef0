//! The rows: how large a model fits, and what its parameters and its activations take.

use anyhow::Result;
use brimful::Bytes;
use brimful::schedule::{Recompute, Schedule};
use brimful_cli::setting::{ModelName, NumberType};
use serde::Serialize;

use super::Experiment;
use super::search::{FoundModel, LargestSearch};
use super::trial::StepMemory;
use crate::journal::Journal;
use crate::work::Workload;

/// The largest model of one experiment.
#[derive(Debug, Serialize)]
pub(super) struct LargestRow {
    contestant: &'static str,
    #[serde(skip)]
    title: String,
    experiment: String,
    model: ModelName,
    shape: String,
    dtype: NumberType,
    batch: usize,
    micro_batch: usize,
    micro_batches: usize,
    stages: usize,
    schedule: Schedule,
    recompute: Recompute,
    balance: Vec<usize>,
    parameters: u64,
    /// Parameters over those of the first row.
    ratio: f64,
    /// The ratio that was published of larger devices.
    published_ratio: Option<f64>,
    samples_per_s: f64,
    /// Of all devices together: what is there between steps too, what comes on top, and both.
    resident_bytes: Bytes,
    activation_bytes: Bytes,
    peak_bytes: Bytes,
    /// Each device's, as planned and as measured.
    planned_peaks: Vec<u64>,
    peaks: Vec<Bytes>,
    limit_bytes: Bytes,
}

impl LargestRow {
    pub(super) fn new(
        search: &LargestSearch,
        experiment: Experiment,
        found: &FoundModel,
        outcome: StepMemory,
        (parameters, ratio): (u64, f64),
    ) -> Self {
        let FoundModel { work, row, .. } = found;
        let sum = |bytes: &[Bytes]| bytes.iter().map(|bytes| bytes.0).sum::<u64>();
        let (resident, peak) = (sum(&outcome.resident), sum(&outcome.peaks));
        Self {
            contestant: "brimful",
            title: title(work, search.limit()),
            experiment: experiment.to_string(),
            model: work.model,
            shape: work.shape(),
            dtype: work.dtype,
            batch: work.batch,
            micro_batch: work.batch / row.choice.micro_batches,
            micro_batches: row.choice.micro_batches,
            stages: experiment.stages,
            schedule: row.choice.schedule,
            recompute: row.choice.recompute,
            balance: row.balance.sizes().to_vec(),
            parameters,
            ratio,
            published_ratio: search.family.published(experiment),
            samples_per_s: work.batch as f64 / outcome.seconds,
            resident_bytes: Bytes(resident),
            activation_bytes: Bytes(peak.saturating_sub(resident)),
            peak_bytes: Bytes(peak),
            planned_peaks: row.peak_bytes.clone(),
            peaks: outcome.peaks,
            limit_bytes: search.limit(),
        }
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let Self { experiment, model, parameters, ratio, .. } = self;
        let published = self.published_ratio.map(|ratio| format!("{ratio:.1}")).unwrap_or_default();
        let planned = self.planned_peaks.iter().sum::<u64>() as f64 / self.peak_bytes.0 as f64;
        let text = format!(
            "  {experiment:<12}{:<18}{parameters:>12}{ratio:>8.1}{published:>11}  {:<12}{:>11}{:>13}\
             {:>11}{planned:>10.2}",
            model.to_string(),
            self.recompute.to_string(),
            self.resident_bytes,
            self.activation_bytes,
            self.peak_bytes,
        );
        journal.write(&self.title, &columns(), &text, self)
    }
}

/// An experiment in which not even the smallest model fits.
#[derive(Debug, Serialize)]
pub(super) struct NoneFitsRow {
    contestant: &'static str,
    #[serde(skip)]
    title: String,
    experiment: String,
    model: ModelName,
    stages: usize,
    limit_bytes: Bytes,
    error: String,
}

impl NoneFitsRow {
    pub(super) fn new(search: &LargestSearch, experiment: Experiment) -> Self {
        let work = search.smallest();
        Self {
            contestant: "brimful",
            title: title(work, search.limit()),
            experiment: experiment.to_string(),
            model: work.model,
            stages: experiment.stages,
            limit_bytes: search.limit(),
            error: format!("not even {} fits", work.model),
        }
    }

    pub(super) fn enter(&self, journal: &mut Journal) -> Result<()> {
        let text = format!("  {:<12}{}", self.experiment, self.error);
        journal.write(&self.title, &columns(), &text, self)
    }
}

fn title(work: &Workload, limit: Bytes) -> String {
    format!("images of {}, mini-batch {}, devices of {limit}", work.shape(), work.batch)
}

fn columns() -> String {
    format!(
        "  {:<12}{:<18}{:>12}{:>8}{:>11}  {:<12}{:>11}{:>13}{:>11}{:>10}",
        "",
        "largest",
        "parameters",
        "ratio",
        "published",
        "recompute",
        "resident",
        "activations",
        "peak",
        "planned"
    )
}
