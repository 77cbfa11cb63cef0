//! Sizer of one kind of mini-batch: its memory models, and its search for a size.
//!
//! A step may run in several memories at once, as a pipeline's does: then the tightest memory decides. A log has
//! the decisions of one step and its number of retries.

use std::ops::Range;

use super::decision::{Decision, Situation, SizeTrial, Why, in_near_equal_parts};
use super::memory_model::{Line, MemoryModel};
use super::policy::{Goal, Policy};
use crate::memory::{self, Usage};
use crate::oom::OutOfMemory;
use crate::{Error, Result};
use brimful_plan::bytes::Bytes;

/// Smallest micro-batch to train with if more samples fit: smaller ones only measure needs, and are rolled back.
/// Layers such as batch normalisation expect a micro-batch to resemble its mini-batch: the gradients of two or
/// three samples may be many times those of the others.
pub(crate) const FEW_SAMPLES: usize = 8;

/// Free memory for a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct FreeMemory {
    /// Bytes free when the step begins.
    pub(crate) available: u64,
    /// Bytes of them that may be planned with.
    pub(crate) budget: u64,
}

/// Memory models of one kind of mini-batch, one for each memory, and its policy.
#[derive(Debug, Clone)]
pub(crate) struct Sizer {
    models: Vec<MemoryModel>,
    pub(super) policy: Policy,
    /// Size in the last log line at the info level.
    announced: Option<usize>,
}

/// Result of a finished search.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Finding {
    pub(crate) size: usize,
    #[serde(rename = "needs")]
    pub(crate) lines: Vec<Line>,
    #[serde(rename = "samples_per_s")]
    pub(crate) rate: Option<f64>,
}

impl Sizer {
    /// Creates a sizer that knows only the least need of a step in each memory.
    pub(crate) fn new(goal: Goal, floors: &[u64]) -> Self {
        let models = floors.iter().map(|floor| MemoryModel::with_floor(*floor)).collect();
        Self::with(models, Policy::new(goal))
    }

    /// Creates a sizer that begins with needs and a size predicted from other shapes.
    pub(crate) fn predicted(goal: Goal, lines: &[Line], floors: &[u64], size: usize) -> Self {
        Self::with(priors(lines, floors), Policy::predicted(goal, size))
    }

    /// Creates a sizer that continues from the result of an earlier run.
    pub(crate) fn remembered(goal: Goal, found: &Finding, floors: &[u64]) -> Self {
        Self::with(priors(&found.lines, floors), Policy::remembered(goal, found.size, found.rate))
    }

    fn with(models: Vec<MemoryModel>, policy: Policy) -> Self {
        Self { models, policy, announced: None }
    }

    /// Returns the result of the search, once it is over.
    pub(crate) fn finding(&self) -> Option<Finding> {
        let size = self.policy.chosen()?;
        Some(Finding { size, lines: self.lines()?, rate: self.policy.rate(size) })
    }

    /// Returns whether the needs of samples are unknown: neither measured, nor predicted, nor remembered.
    pub(crate) fn is_blank(&self) -> bool {
        self.models.iter().any(|model| model.line().is_none())
    }

    /// Returns the needs of samples; `None` if they are not measured in every memory.
    pub(crate) fn lines(&self) -> Option<Vec<Line>> {
        self.models.iter().map(|model| (model.largest_seen() > 0).then(|| model.line())?).collect()
    }

    /// Decides which part of a mini-batch of `samples` to run next; `left` of them have not run yet.
    pub(crate) fn next(
        &mut self,
        free_memories: &[FreeMemory],
        left: usize,
        samples: usize,
    ) -> SizeTrial {
        let pairs = || self.models.iter().zip(free_memories);
        let fits = pairs().map(|(model, free_memory)| model.largest(free_memory.budget));
        let fits = fits.min_by_key(|fits| fits.unwrap_or(0)).flatten();
        // A lone micro-batch has no gradients beside it. So the whole mini-batch may fit, although micro-batches
        // of that size would not fit in a larger mini-batch.
        let holds_all = |(model, free_memory): (&MemoryModel, &FreeMemory)| {
            model.holds_all(samples, free_memory.budget)
        };
        let all = if left == samples && pairs().all(holds_all) { samples } else { 0 };
        let fits = fits.map(|fits| fits.max(all));
        let least = |of: fn(&MemoryModel, u64) -> usize| {
            pairs().map(|(model, free_memory)| of(model, free_memory.budget)).min().unwrap_or(0)
        };
        let reach = least(MemoryModel::reach);
        let sure = least(MemoryModel::sure);
        let seen = self.models.iter().map(MemoryModel::largest_seen).min().unwrap_or(0);
        let available = tightest(free_memories);
        self.policy.next(Situation { fits, seen, reach, sure, available, left, samples })
    }

    /// Returns whether a step would now begin with at least [`FEW_SAMPLES`] samples, or run whole in one size.
    pub(crate) fn begins_well(&self, free_memories: &[FreeMemory], samples: usize) -> bool {
        let first = self.clone().next(free_memories, samples, samples);
        first.size >= FEW_SAMPLES || first.micro_batches.is_none()
    }

    /// Decides how a whole mini-batch is cut. Nothing can be measured while it runs, so the first mini-batch is
    /// cut into at most 64 micro-batches. They have at least 8 samples, unless such a size has failed.
    pub(crate) fn next_whole(&mut self, free_memories: &[FreeMemory], samples: usize) -> SizeTrial {
        let mut trial = self.next(free_memories, samples, samples);
        if trial.why == Why::Probe && self.lines().is_none() {
            trial.size = trial.size.max((samples / 64).max(FEW_SAMPLES).min(self.policy.limit()));
        }
        trial.size = in_near_equal_parts(samples, trial.size);
        trial
    }

    /// Returns the decision to run this trial, before its result is known.
    pub(crate) fn decision(
        &self,
        trial: &SizeTrial,
        ranges: &[Range<usize>],
        free_memories: &[FreeMemory],
    ) -> Decision {
        // Before the first probe nothing is measured: the memory model could only return its lower bound.
        let known = !matches!(trial.why, Why::Probe) || self.lines().is_some();
        let predicted = match is_alone(ranges) {
            true => self.predict_alone(trial.size),
            false => self.predict(trial.size),
        };
        Decision {
            size: trial.size,
            micro_batches: ranges.len(),
            why: trial.why,
            predicted: predicted.filter(|_| known).map(Bytes),
            measured: None,
            available: Bytes(tightest(free_memories)),
            failed: false,
        }
    }

    /// Holds the size as far as memory allows, or resumes the search. Comparisons of whole steps need a constant
    /// size.
    pub(crate) fn hold(&mut self, held: bool) {
        self.policy.held = held;
    }

    /// Sets whether to prefer sizes that leave no remainder, because every further shape is expensive.
    pub(crate) fn even(&mut self, even: bool) {
        self.policy.even = even;
    }

    /// Adapts to a new memory format, which is faster by this factor (see [`Policy::speed_up`]) and may need more
    /// or less memory.
    pub(crate) fn rearranged(&mut self, factor: f64) {
        if let Some(best) = self.policy.speed_up(factor) {
            self.models.iter_mut().for_each(|model| model.forget_above(best));
        }
    }

    /// Predicts the largest need of a size over the memories.
    pub(crate) fn predict(&self, size: usize) -> Option<u64> {
        self.models.iter().map(|model| model.predict(size)).max().flatten()
    }

    fn predict_alone(&self, size: usize) -> Option<u64> {
        self.models.iter().map(|model| model.predict_alone(size)).max().flatten()
    }

    /// Records the need of micro-batches of this size in each memory; `alone` says that there was only one
    /// micro-batch.
    pub(crate) fn observe_needs(&mut self, size: usize, needs: &[u64], alone: bool) {
        let pairs = self.models.iter_mut().zip(needs);
        pairs.for_each(|(model, &need)| model.observe(size, need, alone));
    }

    /// Records the rate of micro-batches of this size, in samples a second.
    pub(crate) fn observe_rate(&mut self, size: usize, rate: f64) {
        if rate.is_finite() && rate > 0.0 {
            self.policy.observe_rate(size, rate);
        }
    }

    /// Logs a decision, at the info level if the size changes.
    pub(crate) fn announce(&mut self, decision: &Decision) {
        if decision.failed {
            tracing::warn!("{decision}: the mini-batch is run again");
        } else if self.announced.replace(decision.size) != Some(decision.size) {
            tracing::info!("{decision}");
        } else {
            tracing::debug!("{decision}");
        }
    }

    /// Records a successful step.
    pub(crate) fn succeeded(&mut self, size: usize, free_memories: &[FreeMemory], retried: bool) {
        self.policy.succeeded(size, tightest(free_memories), retried);
    }

    /// Records that memory ran out.
    pub(crate) fn failed(&mut self, size: usize, free_memories: &[FreeMemory]) {
        self.policy.failed(size, tightest(free_memories));
    }
}

fn priors(lines: &[Line], floors: &[u64]) -> Vec<MemoryModel> {
    let pairs = lines.iter().zip(floors);
    pairs.map(|(line, floor)| MemoryModel::with_prior(*line, *floor)).collect()
}

/// Returns whether this is a single micro-batch, the first of its mini-batch. No gradients are in memory beside
/// it.
pub(crate) fn is_alone(ranges: &[Range<usize>]) -> bool {
    matches!(ranges, [Range { start: 0, .. }])
}

/// Returns the free bytes of the memory that has the least.
pub(crate) fn tightest(free_memories: &[FreeMemory]) -> u64 {
    free_memories.iter().map(|free_memory| free_memory.available).min().unwrap_or(u64::MAX)
}

/// Fraction of a device's or an arena's free memory that stays unplanned, because allocators round up.
const DEVICE_MARGIN: f64 = 0.01;
/// Fraction of a machine's own free memory that stays unplanned: other processes use this memory too, and when it
/// runs out, the system kills processes instead of refusing allocations.
const HOST_MARGIN: f64 = 0.2;

/// Returns the bytes free for a step, less those `reserved` for later.
///
/// # Errors
/// When the memory has no limit and the system does not report its free bytes.
pub(crate) fn free_memory(usage: &Usage, reserved: u64) -> Result<FreeMemory> {
    let (available, margin) = match usage.available {
        Some(available) => (available, DEVICE_MARGIN),
        None => (memory::host()?.available, HOST_MARGIN),
    };
    let available = available.0.saturating_sub(reserved);
    Ok(FreeMemory { available, budget: (available as f64 * (1.0 - margin)) as u64 })
}

/// Decisions and retries of a step so far.
#[derive(Debug, Default)]
pub(crate) struct SizeLog {
    pub(crate) decisions: Vec<Decision>,
    pub(crate) retries: usize,
    /// Whether the last attempt failed with a single sample: one such failure may be bad luck, two in a row are
    /// not.
    at_the_end: bool,
}

impl SizeLog {
    pub(crate) fn extend(&mut self, later: Self) {
        self.decisions.extend(later.decisions);
        self.retries += later.retries;
    }

    /// Records a failed attempt with its decisions. Fails if micro-batches of `least`, the smallest possible size,
    /// have failed twice in a row; otherwise the step is retried.
    pub(crate) fn failed(
        &mut self,
        decisions: Vec<Decision>,
        least: usize,
        sizer: &Sizer,
        free_memories: &[FreeMemory],
        cause: OutOfMemory,
    ) -> Result<()> {
        let single = decisions.last().is_none_or(|decision| decision.size <= least);
        self.decisions.extend(decisions);
        self.retries += 1;
        if !(std::mem::replace(&mut self.at_the_end, single) && single) {
            return Ok(());
        }
        let failed = self.decisions.iter().filter(|decision| decision.failed);
        let mut tried: Vec<usize> = failed.map(|decision| decision.size).collect();
        tried.dedup();
        let available = Bytes(tightest(free_memories));
        // The failure refutes a prediction below the free bytes: the need exceeds them by at least the lacking
        // bytes.
        let refuted = cause.lacking().map(|lacking| available.0.saturating_add(lacking.0));
        let needed = sizer.predict(least).max(refuted).map(Bytes);
        Err(Error::DoesNotFit { tried, needed, available, cause: Box::new(cause) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oom::Place;

    /// Returns the decision for a single sample that ran out of memory.
    fn single(available: Bytes) -> Decision {
        Decision {
            size: 1,
            micro_batches: 1,
            why: Why::BackOff,
            predicted: None,
            measured: None,
            available,
            failed: true,
        }
    }

    #[test]
    fn what_is_said_to_be_needed_is_more_than_what_was_free() {
        let free_memories = [FreeMemory { available: 971, budget: 971 }];
        // The step is predicted to need 723 bytes, which are free; yet it fails.
        let sizer = Sizer::new(Goal::Fastest, &[723]);
        let cause = OutOfMemory {
            place: Place::Arena("test".into()),
            asked: Some(Bytes(200)),
            in_use: Some(Bytes(1900)),
            limit: Some(Bytes(2000)),
            message: String::new(),
        };
        let mut log = SizeLog::default();
        log.failed(vec![single(Bytes(971))], 1, &sizer, &free_memories, cause.clone())
            .expect("once is luck");
        let failed = log.failed(vec![single(Bytes(971))], 1, &sizer, &free_memories, cause);
        let Err(Error::DoesNotFit { needed, available, .. }) = failed else {
            panic!("{failed:?}");
        };
        assert_eq!((needed, available), (Some(Bytes(971 + 100)), Bytes(971)));
    }
}
