//! What the planner chooses, apart from the balance.

use std::fmt;

use serde::Serialize;

use crate::schedule::{Recompute, Schedule};

/// A schedule, a number of micro-batches, and what is recomputed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PlanChoice {
    /// The schedule.
    pub schedule: Schedule,
    /// The number of micro-batches.
    pub micro_batches: usize,
    /// What is recomputed, at the most: a [row](super::PlanRow::stages) says it of each stage.
    pub recompute: Recompute,
}

impl PlanChoice {
    /// Stages on each device, then micro-batches: of two equal steps the smaller is simpler.
    pub(super) fn complexity(&self) -> (usize, usize) {
        (self.schedule.stages_per_device(), self.micro_batches)
    }
}

impl fmt::Display for PlanChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { schedule, micro_batches, recompute } = self;
        write!(f, "{schedule}, m = {micro_batches}, recompute {recompute}")
    }
}
