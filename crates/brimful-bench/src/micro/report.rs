//! Rows of micro-batched training: speeds, and peak memory.

use anyhow::{Context, Result};
use brimful::Bytes;
use serde::Serialize;

use super::contest::MicroContestant;
use crate::columns::{Columns, IN_ONE_PIECE, Speed, Staging};
use crate::journal::Journal;
use crate::timed::TurnFigures;
use crate::tuned::Tuning;
use crate::work::Workload;

/// Figures of a contestant.
#[derive(Debug, Serialize)]
struct SpeedRow {
    #[serde(flatten)]
    columns: Columns,
    #[serde(flatten)]
    staging: Staging,
    cuda_graphs: bool,
    channels_last: bool,
    #[serde(flatten)]
    speed: Speed,
    /// Speed, divided by that of the hand-written loop in the same run.
    ratio: f64,
    /// Speed, divided by that of the library with the mini-batch on the device; 1 means that all copies are
    /// hidden.
    ratio_to_resident: Option<f64>,
    /// Seconds of the warm-up steps, in which kernels are chosen and micro-batches captured.
    warm_up_seconds: Vec<f64>,
    peak_bytes: Option<Bytes>,
    loss: f64,
}

/// Peak of a mini-batch.
#[derive(Debug, Serialize)]
pub(super) struct MemoryRow {
    #[serde(flatten)]
    pub(super) columns: Columns,
    #[serde(flatten)]
    pub(super) staging: Staging,
    pub(super) micro_batches: usize,
    pub(super) samples_per_s: f64,
    pub(super) peak_bytes: Bytes,
    /// Mini-batch that it is compared with, in micro-batches.
    pub(super) compared_with: Option<usize>,
    /// Peak, divided by that of the mini-batch that it is compared with.
    pub(super) ratio: Option<f64>,
}

/// Enters a row for each contestant, with its ratios.
pub(super) fn enter(
    work: &Workload,
    all: &[(MicroContestant, TurnFigures)],
    journal: &mut Journal,
) -> Result<()> {
    let seconds_of = |wanted| {
        let found = all.iter().find(|(contestant, _)| *contestant == wanted);
        found.map(|(_, figures)| figures.times.median()).context("a contestant is missing")
    };
    let by_hand = seconds_of(MicroContestant::Loop)?;
    let resident = seconds_of(MicroContestant::Resident)?;
    for (contestant, shown) in all {
        let seconds = shown.times.median();
        let Tuning { cuda_graphs, channels_last } = contestant.tuning();
        // The copies are the only difference between the streaming and the resident contestant.
        let streams = *contestant == MicroContestant::Streaming;
        journal.enter(&SpeedRow {
            columns: Columns::new(contestant.name(), work),
            staging: IN_ONE_PIECE,
            cuda_graphs,
            channels_last,
            speed: Speed::new(work, &shown.times),
            ratio: by_hand / seconds,
            ratio_to_resident: streams.then_some(resident / seconds),
            warm_up_seconds: shown.warm_up.clone(),
            peak_bytes: shown.peak,
            loss: shown.loss,
        })?;
    }
    Ok(())
}
