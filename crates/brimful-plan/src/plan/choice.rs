//! Choice of the planner, apart from the balance.

use std::fmt;

use serde::Serialize;

use crate::schedule::{Recompute, Schedule};

/// Schedule, number of micro-batches, and recomputation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PlanChoice {
    /// Schedule.
    pub schedule: Schedule,
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// Upper bound on the recomputation; a [row](super::PlanRow::stages) has the recomputation of each stage.
    pub recompute: Recompute,
}

impl PlanChoice {
    /// Returns a key for sorting: stages per device, then micro-batches. Among equally long steps, the one
    /// with the smaller key is simpler.
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
