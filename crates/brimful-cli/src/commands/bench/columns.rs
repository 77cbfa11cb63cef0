//! Columns that rows of several benchmarks share: what was run, and how fast it was.

use serde::Serialize;

use super::times::Times;
use super::work::Work;
use crate::setting::{ModelName, NumberType};

/// What was run.
#[derive(Debug, Serialize)]
pub(super) struct Columns {
    pub(super) contestant: &'static str,
    pub(super) model: ModelName,
    pub(super) shape: String,
    dtype: NumberType,
    batch: usize,
    pub(super) micro_batch: usize,
}

/// How fast it was.
#[derive(Debug, Serialize)]
pub(super) struct Speed {
    pub(super) samples_per_s: f64,
    /// (Longest − shortest) / median of the steps.
    pub(super) spread: f64,
    seconds: Vec<f64>,
}

impl Columns {
    pub(super) fn new(contestant: &'static str, work: &Work) -> Self {
        Self {
            contestant,
            model: work.model,
            shape: work.shape(),
            dtype: work.dtype,
            batch: work.batch,
            micro_batch: work.micro_batch,
        }
    }
}

impl Speed {
    pub(super) fn new(work: &Work, times: &Times) -> Self {
        let samples_per_s = work.batch as f64 / times.median();
        Self { samples_per_s, spread: times.spread(), seconds: times.0.clone() }
    }
}
