//! Rows: size of the largest model, and the memory of its parameters and activations.

use anyhow::Result;
use brimful::Bytes;
use brimful::plan::PlanChoice;
use serde::Serialize;
use serde_json::{Value, json};

use super::search::{FoundModel, LargestSearch};
use super::trial::StepMemory;
use super::{Experiment, Way};
use crate::columns::{Columns, Staging};
use crate::work::Workload;

/// Largest model of one experiment.
#[derive(Debug, Serialize)]
pub(super) struct LargestRow {
    #[serde(flatten)]
    columns: Columns,
    experiment: String,
    micro_batches: usize,
    #[serde(flatten)]
    staging: Staging,
    offloaded_stages: usize,
    balance: Vec<usize>,
    parameters: u64,
    /// Number of parameters, divided by that of the first row.
    ratio: f64,
    /// Published ratio, on larger devices.
    published_ratio: Option<f64>,
    samples_per_s: f64,
    /// Bytes on all devices together: resident between steps, in addition during a step, and both.
    resident_bytes: Bytes,
    activation_bytes: Bytes,
    peak_bytes: Bytes,
    /// Peak of each device, planned and measured.
    planned_peaks: Vec<u64>,
    peaks: Vec<Bytes>,
    limit_bytes: Bytes,
    /// Host bytes of offloaded stages, and whether host or device memory prevents a larger model.
    host_bytes: Bytes,
    #[serde(skip_serializing_if = "Option::is_none")]
    bound: Option<&'static str>,
}

impl LargestRow {
    pub(super) fn new(
        search: &LargestSearch,
        experiment: Experiment,
        found: &FoundModel,
        outcome: StepMemory,
        (parameters, ratio): (u64, f64),
    ) -> Result<Self> {
        let FoundModel { work, row, .. } = found;
        let sum = |bytes: &[Bytes]| bytes.iter().map(|bytes| bytes.0).sum::<u64>();
        let (resident, peak) = (sum(&outcome.resident), sum(&outcome.peaks));
        let is_offloaded = experiment.way == Way::Offload;
        let PlanChoice { schedule, micro_batches, recompute } = row.choice;
        let run = Workload { micro_batch: work.batch / micro_batches, ..work.clone() };
        Ok(Self {
            columns: Columns::new("brimful", &run),
            experiment: experiment.to_string(),
            micro_batches,
            staging: Staging::new(row.balance.sizes().len(), schedule, recompute),
            offloaded_stages: row.at_host(),
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
            limit_bytes: search.capacity.limit,
            host_bytes: Bytes(row.host_bytes),
            bound: is_offloaded.then(|| search.bound(found)).transpose()?,
        })
    }
}

/// Returns the row of an experiment in which not even the smallest model fits.
pub(super) fn none_fits(search: &LargestSearch, experiment: Experiment) -> Value {
    let model = search.smallest.model;
    json!({
        "contestant": "brimful",
        "experiment": experiment.to_string(),
        "model": model,
        "devices": experiment.devices,
        "limit_bytes": search.capacity.limit,
        "error": format!("not even {model} fits"),
    })
}
