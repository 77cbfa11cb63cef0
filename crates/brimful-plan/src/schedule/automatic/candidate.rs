//! Candidates for an automatic schedule, compared by memory and time.

use super::super::{Action, ActionKind, Actions, CostError, recompute, simulate};
use super::Work;

/// Relative difference below which makespans are equal: times are sums in different orders, so equal steps can
/// differ by rounding.
const ROUNDING: f64 = 1e-9;

/// Lists of actions, and their simulated time and memory.
#[derive(Debug)]
pub(in super::super) struct Candidate {
    pub(in super::super) actions: Actions,
    /// Lists without recomputes.
    pub(super) lists: Vec<Vec<Action>>,
    pub(super) makespan: f64,
    /// Largest excess of a device's memory, in bytes.
    over: u64,
    largest_peak: u64,
    /// Largest number of activations on any device: the measure of memory if no bytes are given.
    most_held: usize,
    /// Number of split backwards.
    halved: usize,
}

impl Candidate {
    /// Inserts the recomputes and simulates the lists; `None` if they cannot be run.
    pub(super) fn new(work: Work<'_>, lists: Vec<Vec<Action>>) -> Result<Option<Self>, CostError> {
        let mode = |stage: super::super::StageId| work.recompute[stage.index()];
        let woven = lists.iter().map(|list| recompute::weave(list.clone(), mode)).collect();
        let Ok(actions) = Actions::new(woven) else { return Ok(None) };
        let simulation = simulate(&actions, &work.recipe.costs)?;
        let peaks = || simulation.devices().iter().map(|device| device.peak_bytes);
        let over = |(peak, limit): (u64, &Option<u64>)| {
            limit.map_or(0, |limit| peak.saturating_sub(limit))
        };
        let is_half = |action: &&Action| action.kind == ActionKind::WeightGradient;
        Ok(Some(Self {
            makespan: simulation.makespan(),
            over: peaks().zip(&work.recipe.memory).map(over).max().unwrap_or(0),
            largest_peak: peaks().max().unwrap_or(0),
            most_held: simulation.devices().iter().map(|used| used.peak_held).max().unwrap_or(0),
            halved: lists.iter().flatten().filter(is_half).count(),
            actions,
            lists,
        }))
    }

    /// Returns whether this candidate is better: by excess of memory, then by time. Among equals, less memory
    /// wins, then fewer split backwards.
    pub(super) fn is_better(&self, other: &Self) -> bool {
        let rest = |of: &Self| (of.largest_peak, of.most_held, of.halved);
        if self.over != other.over {
            return self.over < other.over;
        }
        let least = f64::min(self.makespan, other.makespan);
        if (self.makespan - other.makespan).abs() > ROUNDING * least {
            return self.makespan < other.makespan;
        }
        rest(self) < rest(other)
    }
}
