//! What is known of one kind of mini-batch, and the sizes that follow from it.
//!
//! A step may run in several memories at once, as a pipeline's does: then the tightest decides.

use std::ops::Range;

use super::decision::{Decision, Why};
use super::memory_model::{Line, MemoryModel};
use super::policy::{Goal, Policy};
use super::trial::{Situation, SizeTrial, in_near_equal_parts};

/// Layers such as batch normalisation want a micro-batch to be like its mini-batch: two or three
/// samples may come out with gradients many times those of the others. So fewer than 8 are not trained
/// with only to learn what they need.
pub(crate) const FEW_SAMPLES: usize = 8;

/// Memory that a step may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct MemoryRoom {
    /// Bytes free when it begins.
    pub(crate) available: u64,
    /// Those of them that may be planned with.
    pub(crate) budget: u64,
}

/// One kind's memory models, one for each memory, and its policy.
#[derive(Debug, Clone)]
pub(crate) struct Sizer {
    models: Vec<MemoryModel>,
    pub(super) policy: Policy,
    /// The size of the last log line that people see.
    announced: Option<usize>,
}

/// What a size was found to be.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Finding {
    pub(crate) size: usize,
    #[serde(rename = "needs")]
    pub(crate) lines: Vec<Line>,
    #[serde(rename = "samples_per_s")]
    pub(crate) rate: Option<f64>,
}

impl Sizer {
    /// For memories of which no more is known than what a step needs there at least.
    pub(crate) fn new(goal: Goal, floors: &[u64]) -> Self {
        let models = floors.iter().map(|floor| MemoryModel::with_floor(*floor)).collect();
        Self::with(models, Policy::new(goal))
    }

    /// Begins with needs, and a size, that other shapes suggest.
    pub(crate) fn predicted(goal: Goal, lines: &[Line], floors: &[u64], size: usize) -> Self {
        Self::with(priors(lines, floors), Policy::predicted(goal, size))
    }

    /// Goes on from what an earlier run has found.
    pub(crate) fn remembered(goal: Goal, found: &Finding, floors: &[u64]) -> Self {
        Self::with(priors(&found.lines, floors), Policy::remembered(goal, found.size, found.rate))
    }

    fn with(models: Vec<MemoryModel>, policy: Policy) -> Self {
        Self { models, policy, announced: None }
    }

    /// What has been found, once there is nothing more to learn.
    pub(crate) fn finding(&self) -> Option<Finding> {
        let size = self.policy.settled()?;
        Some(Finding { size, lines: self.lines()?, rate: self.policy.rate(size) })
    }

    /// Whether nothing is known yet of what samples need, be it from other shapes or an earlier run.
    pub(crate) fn is_blank(&self) -> bool {
        self.models.iter().any(|model| model.line().is_none())
    }

    /// What samples need, where that has been measured.
    pub(crate) fn lines(&self) -> Option<Vec<Line>> {
        self.models.iter().map(|model| (model.largest_seen() > 0).then(|| model.line())?).collect()
    }

    /// Decides what to run next of a mini-batch of `samples`, of which `left` have not been run.
    pub(crate) fn next(&mut self, rooms: &[MemoryRoom], left: usize, samples: usize) -> SizeTrial {
        let pairs = || self.models.iter().zip(rooms);
        let fits = pairs().map(|(model, room)| model.largest(room.budget));
        let fits = fits.min_by_key(|fits| fits.unwrap_or(0)).flatten();
        // A lone micro-batch has no gradients beside it: the whole mini-batch may fit where a larger one's
        // micro-batches of that size would not.
        let holds_all =
            |(model, room): (&MemoryModel, &MemoryRoom)| model.holds_all(samples, room.budget);
        let all = if left == samples && pairs().all(holds_all) { samples } else { 0 };
        let fits = fits.map(|fits| fits.max(all));
        let least = |of: fn(&MemoryModel, u64) -> usize| {
            pairs().map(|(model, room)| of(model, room.budget)).min().unwrap_or(0)
        };
        let reach = least(MemoryModel::reach);
        let sure = least(MemoryModel::sure);
        let seen = self.models.iter().map(MemoryModel::largest_seen).min().unwrap_or(0);
        let available = tightest(rooms);
        self.policy.next(Situation { fits, seen, reach, sure, available, left, samples })
    }

    /// Whether a step that began now would do so with more than a few samples, or as many as fit.
    pub(crate) fn begins_well(&self, rooms: &[MemoryRoom], samples: usize) -> bool {
        let first = self.clone().next(rooms, samples, samples);
        first.size >= FEW_SAMPLES || first.micro_batches.is_none()
    }

    /// Decides how a whole mini-batch is cut. Nothing can be learnt while it runs, so the first time
    /// it is cut into no more than 64, and not into few samples each as long as none has failed.
    pub(crate) fn next_whole(&mut self, rooms: &[MemoryRoom], samples: usize) -> SizeTrial {
        let mut trial = self.next(rooms, samples, samples);
        if trial.why == Why::Probe && self.lines().is_none() {
            trial.size = trial.size.max((samples / 64).max(FEW_SAMPLES).min(self.policy.limit()));
        }
        trial.size = in_near_equal_parts(samples, trial.size);
        trial
    }

    /// Keeps the size as it is, as far as memory allows, or lets the search go on: while something
    /// else is measured in whole steps.
    pub(crate) fn hold(&mut self, held: bool) {
        self.policy.held = held;
    }

    /// Prefers sizes that leave no remainder, because every further shape is dear, or does not.
    pub(crate) fn even(&mut self, even: bool) {
        self.policy.even = even;
    }

    /// Numbers are in another order in memory: see [`Policy::speed_up`]. Needs may have changed too.
    pub(crate) fn rearranged(&mut self, factor: f64) {
        if let Some(best) = self.policy.speed_up(factor) {
            self.models.iter_mut().for_each(|model| model.forget_above(best));
        }
    }

    /// The most that a size is expected to need in one of the memories.
    pub(crate) fn predict(&self, size: usize) -> Option<u64> {
        self.models.iter().map(|model| model.predict(size)).max().flatten()
    }

    pub(super) fn predict_alone(&self, size: usize) -> Option<u64> {
        self.models.iter().map(|model| model.predict_alone(size)).max().flatten()
    }

    /// Learns what micro-batches of this size needed in each memory, or one alone.
    pub(crate) fn observe_needs(&mut self, size: usize, needs: &[u64], alone: bool) {
        let pairs = self.models.iter_mut().zip(needs);
        pairs.for_each(|(model, &need)| model.observe(size, need, alone));
    }

    /// Learns how many samples a second micro-batches of this size ran.
    pub(crate) fn observe_rate(&mut self, size: usize, rate: f64) {
        if rate.is_finite() && rate > 0.0 {
            self.policy.observe_rate(size, rate);
        }
    }

    /// Logs a decision, for people to see where it changes something.
    pub(crate) fn announce(&mut self, decision: &Decision) {
        if decision.failed {
            tracing::warn!("{decision}: the mini-batch is run again");
        } else if self.announced.replace(decision.size) != Some(decision.size) {
            tracing::info!("{decision}");
        } else {
            tracing::debug!("{decision}");
        }
    }

    /// A step has succeeded.
    pub(crate) fn succeeded(&mut self, size: usize, rooms: &[MemoryRoom], retried: bool) {
        self.policy.succeeded(size, tightest(rooms), retried);
    }

    /// Memory ran out.
    pub(crate) fn failed(&mut self, size: usize, rooms: &[MemoryRoom]) {
        self.policy.failed(size, tightest(rooms));
    }
}

fn priors(lines: &[Line], floors: &[u64]) -> Vec<MemoryModel> {
    let pairs = lines.iter().zip(floors);
    pairs.map(|(line, floor)| MemoryModel::with_prior(*line, *floor)).collect()
}

/// Whether this is a single micro-batch with none before it: there are no gradients beside it.
pub(crate) fn is_alone(ranges: &[Range<usize>]) -> bool {
    matches!(ranges, [Range { start: 0, .. }])
}

/// What is free in the memory that has the least.
pub(crate) fn tightest(rooms: &[MemoryRoom]) -> u64 {
    rooms.iter().map(|room| room.available).min().unwrap_or(u64::MAX)
}
