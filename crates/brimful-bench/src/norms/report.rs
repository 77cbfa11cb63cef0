//! Rows of exact and deferred BatchNorms.

use anyhow::Result;
use brimful::Bytes;
use serde::Serialize;

use super::contest::NormContestant;
use crate::columns::{Columns, Speed};
use crate::journal::Journal;
use crate::timed::TurnFigures;
use crate::work::Workload;

/// Figures of a contestant.
#[derive(Debug, Serialize)]
struct NormRow {
    #[serde(flatten)]
    columns: Columns,
    #[serde(flatten)]
    speed: Speed,
    /// Speed, divided by that of the plain step in the same run.
    ratio: Option<f64>,
    /// Seconds of the warm-up steps, in which kernels are chosen and the capacity for held activations is
    /// determined.
    warm_up_seconds: Vec<f64>,
    peak_bytes: Option<Bytes>,
    /// Peak, divided by that of the run's first mini-batch.
    peak_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_limit: Option<String>,
    loss: f64,
}

/// Rows of a run, mini-batch by mini-batch.
pub(super) struct NormRows {
    pub(super) limit: Option<Bytes>,
    /// Peaks of the first mini-batch.
    pub(super) peaks: Vec<(NormContestant, Bytes)>,
}

impl NormRows {
    /// Enters a row for each contestant.
    pub(super) fn enter(
        &mut self,
        work: &Workload,
        all: &[(NormContestant, TurnFigures)],
        journal: &mut Journal,
    ) -> Result<()> {
        let plain = all.iter().find(|(contestant, _)| *contestant == NormContestant::Deferred);
        let plain = plain.map(|(_, shown)| shown.times.median());
        for (contestant, shown) in all {
            journal.enter(&NormRow {
                columns: Columns::new(contestant.name(), work),
                speed: Speed::new(work, &shown.times),
                ratio: plain.map(|plain| plain / shown.times.median()),
                warm_up_seconds: shown.warm_up.clone(),
                peak_bytes: shown.peak,
                peak_ratio: shown.peak.and_then(|peak| self.growth(*contestant, peak)),
                memory_limit: self.limit.map(|limit| limit.to_string()),
                loss: shown.loss,
            })?;
        }
        Ok(())
    }

    /// Returns a peak, divided by that of the first mini-batch; none for the first mini-batch itself.
    fn growth(&mut self, contestant: NormContestant, peak: Bytes) -> Option<f64> {
        let first = self.peaks.iter().find(|(who, _)| *who == contestant);
        match first {
            Some((_, first)) => Some(peak.0 as f64 / first.0 as f64),
            None => {
                self.peaks.push((contestant, peak));
                None
            }
        }
    }
}
