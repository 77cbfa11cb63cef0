//! Columns that rows of several benchmarks share: what was run, and how fast it was.

use brimful_cli::setting::NumberType;
use serde::Serialize;

use crate::times::StepTimes;
use crate::work::Workload;

/// What was run.
#[derive(Debug, Serialize)]
pub(crate) struct Columns {
    pub(crate) contestant: &'static str,
    pub(crate) model: String,
    pub(crate) shape: String,
    dtype: NumberType,
    batch: usize,
    pub(crate) micro_batch: usize,
}

/// How fast it was.
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

impl Speed {
    pub(crate) fn new(work: &Workload, times: &StepTimes) -> Self {
        let samples_per_s = work.batch as f64 / times.median();
        Self { samples_per_s, spread: times.spread(), seconds: times.0.clone() }
    }
}
