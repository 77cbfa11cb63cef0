//! Columns that rows of several benchmarks share: the work, and its speed.

use brimful::schedule::{Recompute, Schedule};
use brimful_cli::setting::NumberType;
use serde::Serialize;

use crate::times::StepTimes;
use crate::work::Workload;

/// Work of a row.
#[derive(Debug, Serialize)]
pub(crate) struct Columns {
    pub(crate) contestant: &'static str,
    pub(crate) model: String,
    pub(crate) shape: String,
    dtype: NumberType,
    batch: usize,
    pub(crate) micro_batch: usize,
}

/// Stages and schedule of a row.
#[derive(Debug, Serialize)]
pub(crate) struct Staging {
    stages: usize,
    schedule: Option<Schedule>,
    recompute: Option<Recompute>,
}

/// Staging of a model without stages.
pub(crate) const IN_ONE_PIECE: Staging = Staging { stages: 1, schedule: None, recompute: None };

/// Speed of a row.
#[derive(Debug, Serialize)]
pub(crate) struct Speed {
    pub(crate) samples_per_s: f64,
    /// (Longest − shortest) / median of the steps.
    pub(crate) spread: f64,
    seconds: Vec<f64>,
}

impl Columns {
    pub(crate) fn new(contestant: &'static str, work: &Workload) -> Self {
        Self {
            contestant,
            model: work.name(),
            shape: work.shape(),
            dtype: work.dtype,
            batch: work.batch,
            micro_batch: work.micro_batch,
        }
    }
}

impl Staging {
    pub(crate) fn new(stages: usize, schedule: Schedule, recompute: Recompute) -> Self {
        Self { stages, schedule: Some(schedule), recompute: Some(recompute) }
    }
}

impl Speed {
    pub(crate) fn new(work: &Workload, times: &StepTimes) -> Self {
        let samples_per_s = work.batch as f64 / times.median();
        Self { samples_per_s, spread: times.spread(), seconds: times.0.clone() }
    }
}
