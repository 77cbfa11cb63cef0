//! Search for the next size: probe, climb, choose; back off, and grow again.
//!
//! ```text
//!   probe     two small micro-batches, to learn what a sample needs
//!   climb     32 times the size, or what is known to fit, while that is faster   (the fastest size)
//!   reach     as far as the memory model is trusted, until the largest that fits   (the largest size)
//!   choose    the best of those, measured again in whole steps while the run is young
//!   back off  below what failed; above it once more, after many calm steps or when memory is free
//! ```
//!
//! Every trial is real work: a few micro-batches of the mini-batch at hand. Only the very first ones, of a
//! few samples, may be rolled back by the caller.

use super::decision::{Situation, SizeTrial, Why, in_near_equal_parts};
use super::rates::Rates;

/// Goal of an automatic size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Goal {
    #[default]
    Fastest,
    Largest,
}

/// Number of samples in the first micro-batches: 2, because batch normalisation cannot train with one.
const FIRST_SIZE: usize = 2;
/// Number of micro-batches in a timed trial: the first warms up, the other 2 are timed.
const REPEATS: usize = 3;
/// Factor by which the climb multiplies the size. A device has to choose kernels for every new shape, so few large
/// increases are cheaper than many small ones.
const CLIMB_FACTOR: usize = 32;
/// No size is tried between two sizes that are less than 30 % apart, because their rates would not differ
/// measurably.
const MIN_GAP_FACTOR: f64 = 1.3;
/// A size that divides the samples equally is preferred if it is at least 65 % of the largest size that fits.
const EVEN_MIN_RATIO: f64 = 0.65;
/// A size at least 10 % above the best is worth a timed step.
const WORTHWHILE_FACTOR: f64 = 1.1;
/// A size counts as faster from 2 % on: smaller differences are noise.
const FASTER_FACTOR: f64 = 1.02;
/// Number of steps used to find the fastest size.
const LEARNING_STEPS: u32 = 9;
/// Sizes with at least 93 % of the best rate may turn out to be the best: each is measured 3 times while
/// learning.
const NEAR_BEST_RATIO: f64 = 0.93;
const READINGS: usize = 3;

/// State of the search for one kind of mini-batch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Policy {
    goal: Goal,
    /// Size to begin with, from another shape or an earlier run.
    start: Option<(usize, Why)>,
    rates: Rates,
    climb: Climb,
    chosen: Option<Chosen>,
    failures: Failures,
    steps: u32,
    /// Largest size known to fit.
    fitted: usize,
    /// Whether the search is paused.
    pub(super) held: bool,
    /// Whether every further shape is expensive, so that sizes are to divide the samples equally.
    pub(super) even: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Climb {
    /// Largest size tried in this climb.
    rung: usize,
    /// Number of consecutive sizes that were no faster.
    misses: u32,
    over: bool,
    /// Size at which memory ended the climb.
    bound: Option<usize>,
}

/// Size with which a step was run outside of a trial.
#[derive(Debug, Clone, Copy)]
struct Chosen {
    size: usize,
    available: u64,
}

impl Policy {
    pub(crate) fn new(goal: Goal) -> Self {
        Self { goal, ..Self::default() }
    }

    /// Creates a policy that begins with a size predicted from samples of another shape.
    pub(crate) fn predicted(goal: Goal, size: usize) -> Self {
        Self { start: Some((size, Why::Predicted)), ..Self::new(goal) }
    }

    /// Creates a policy that continues with the size that an earlier run has found.
    pub(crate) fn remembered(goal: Goal, size: usize, rate: Option<f64>) -> Self {
        let climb = Climb { rung: size, over: true, ..Climb::default() };
        let mut rates = Rates::default();
        rates.observe(size, rate.unwrap_or(f64::MIN_POSITIVE));
        let start = Some((size, Why::Remembered));
        Self { start, climb, rates, steps: LEARNING_STEPS, ..Self::new(goal) }
    }

    /// Returns the size found, once the search is over.
    pub(crate) fn chosen(&self) -> Option<usize> {
        let learnt = self.goal == Goal::Largest || self.steps >= LEARNING_STEPS;
        self.chosen.filter(|_| learnt).map(|chosen| chosen.size)
    }

    /// Returns the best size so far.
    pub(crate) fn best(&self) -> Option<usize> {
        let fastest = || self.rates.best(usize::MAX).map(|(size, _)| size);
        self.chosen.map(|chosen| chosen.size).or_else(fastest)
    }

    /// Returns the largest size that failures allow.
    pub(crate) fn limit(&self) -> usize {
        self.failures.cap()
    }

    pub(crate) fn rate(&self, size: usize) -> Option<f64> {
        self.rates.of(size)
    }

    /// Decides what to run next.
    pub(crate) fn next(&mut self, now: Situation) -> SizeTrial {
        self.failures.review(now.available);
        self.fitted = now.seen;
        let cap = self.failures.cap();
        let Some(fits) = now.fits else {
            let size = FIRST_SIZE.min(cap).min(now.samples);
            return SizeTrial { size, micro_batches: Some(2), why: Why::Probe, timed: true };
        };
        let top = fits.min(cap).clamp(1, now.samples);
        if let Some((size, why)) = self.start.take() {
            return self.begin(size.min(top), why);
        }
        match self.goal {
            Goal::Largest => self.reach(top, &now),
            Goal::Fastest => self.climb(top, &now),
        }
    }

    fn begin(&mut self, size: usize, why: Why) -> SizeTrial {
        // A prediction from another shape may be wrong, and a failure costs the step so far: half of the size is
        // tried first. A size that an earlier run measured is used unchanged.
        let size = if why == Why::Predicted { (size / 2).max(1) } else { size };
        self.climb.rung = self.climb.rung.max(size);
        let micro_batches = (why == Why::Predicted).then_some(1);
        SizeTrial { size, micro_batches, why, timed: why == Why::Predicted }
    }

    /// Grows towards the largest size, never far above the sizes already measured.
    fn reach(&mut self, top: usize, now: &Situation) -> SizeTrial {
        // Growth by at most 2 % is not worth a new shape.
        let size = match self.chosen {
            Some(last) if last.size <= top && top - last.size <= last.size / 50 => last.size,
            _ => top.min(now.reach.max(FIRST_SIZE)),
        };
        // The need at this size may show that more would fit.
        let parts = in_near_equal_parts(now.samples, size);
        if parts > now.seen && parts < now.left {
            // The first micro-batch of a step has no gradients beside it: the second shows the need.
            let micro_batches = Some(if now.is_start() { 2 } else { 1 });
            return SizeTrial { size: parts, micro_batches, why: Why::Probe, timed: false };
        }
        self.choose(size, now)
    }

    /// Replaces the chosen size by the smaller one that the ranks agreed on, although a larger one might fit on
    /// this rank. The smaller size is the one to remember.
    pub(crate) fn overruled(&mut self, size: usize, available: u64) {
        self.chosen = Some(Chosen { size, available });
    }

    /// Scales the rates of the size in use and of all smaller ones by this factor, and measures larger sizes
    /// again. Returns the size in use.
    pub(crate) fn speed_up(&mut self, factor: f64) -> Option<usize> {
        let Chosen { size, .. } = self.chosen?;
        // Scaled, not dropped: measuring all smaller sizes again would take a step each.
        self.rates.speed_up(factor);
        self.rates.forget_above(size);
        self.climb = Climb { rung: size, ..Climb::default() };
        Some(size)
    }

    /// Returns the size of the near-equal micro-batches that `samples` are cut into, of at most `size` each. If
    /// further shapes are expensive, prefers a somewhat smaller size that leaves no rest.
    fn parts(&self, samples: usize, size: usize) -> usize {
        let fewest = samples.div_ceil(size);
        let most = if self.even { (fewest as f64 / EVEN_MIN_RATIO) as usize } else { fewest };
        let equal = (fewest..=most).find(|&parts| samples.is_multiple_of(parts));
        samples.div_ceil(equal.unwrap_or(fewest))
    }

    /// Climbs to larger sizes while they are faster.
    fn climb(&mut self, top: usize, now: &Situation) -> SizeTrial {
        // Memory formats are being compared by whole steps: a change of size would falsify the comparison.
        if let (true, Some((best, _))) = (self.held, self.rates.best(top)) {
            return self.choose(best, now);
        }
        // Memory had ended the climb, and now allows larger sizes.
        if self.climb.bound.is_some_and(|bound| top >= bound + bound.div_ceil(4)) {
            self.climb.over = false;
            self.climb.bound = None;
        }
        if !self.climb.over {
            let known = now.reach.max(now.sure).max(FIRST_SIZE);
            let higher = self.climb.rung.saturating_mul(CLIMB_FACTOR).min(known);
            let next = self.parts(now.samples, higher.clamp(FIRST_SIZE.min(top), top));
            if next > self.climb.rung {
                // A size is timed over at least two micro-batches. If fewer are left, the next step measures it.
                if now.is_start() || now.left >= 2 * next {
                    self.climb.rung = next;
                    return SizeTrial::measure(next, Some(REPEATS));
                }
            } else {
                self.climb.over = true;
                self.climb.bound = Some(top);
            }
        }
        match self.doubtful(top, now) {
            Some(size) => SizeTrial::measure(size, None),
            None => {
                let best = self.rates.best(top).map_or(top.min(self.climb.rung), |(size, _)| size);
                self.choose(best.max(1), now)
            }
        }
    }

    /// Returns a size that is worth a whole step early in the run: a size next to the best that was never tried,
    /// or a size about as fast as the best that was measured too seldom.
    fn doubtful(&self, top: usize, now: &Situation) -> Option<usize> {
        if !self.climb.over || !now.is_start() || self.steps >= LEARNING_STEPS {
            return None;
        }
        let (best, _) = self.rates.best(top)?;
        let seldom = |&size: &usize| self.rates.count(size) < READINGS;
        self.between(best, top, now.samples).or_else(|| {
            self.rates
                .near_best(top, NEAR_BEST_RATIO)
                .filter(seldom)
                .min_by_key(|&size| self.rates.count(size))
        })
    }

    /// Returns a size half way between the best and its nearest measured neighbours, in the wider gap first. If
    /// the best size is the largest measured one, returns the largest size that memory allows.
    fn between(&self, best: usize, top: usize, samples: usize) -> Option<usize> {
        let width = |(from, to): (usize, usize)| to as f64 / from.max(1) as f64;
        let (below, above) = self.rates.neighbours(best);
        let all = self.parts(samples, top);
        if above.is_none() && width((best, all)) > WORTHWHILE_FACTOR {
            return Some(all);
        }
        let below = below.unwrap_or(FIRST_SIZE);
        let above = above.unwrap_or(top).min(top);
        let mut gaps = [(below, best), (best, above)];
        gaps.sort_by(|a, b| width(*b).total_cmp(&width(*a)));
        // The geometric mean, because sizes range over several orders of magnitude.
        let wide = gaps.into_iter().filter(|&gap| width(gap) > MIN_GAP_FACTOR);
        let middles = wide.map(|(from, to)| (from as f64 * to as f64).sqrt().round() as usize);
        let mut sizes =
            middles.map(|size| self.parts(samples, size.clamp(FIRST_SIZE, top.max(FIRST_SIZE))));
        sizes.find(|&size| size <= top && self.rates.count(size) == 0)
    }

    fn choose(&mut self, size: usize, now: &Situation) -> SizeTrial {
        let why = self.reason(size, now.available);
        self.chosen = Some(Chosen { size, available: now.available });
        SizeTrial { size, micro_batches: None, why, timed: false }
    }

    /// Returns the reason for this size: the change since the last choice, or the goal.
    fn reason(&self, size: usize, available: u64) -> Why {
        let goal = match self.goal {
            Goal::Fastest => Why::Fastest,
            Goal::Largest => Why::Largest,
        };
        if let Some(why) = self.failures.reason(size) {
            return why;
        }
        let Some(last) = self.chosen.filter(|last| last.size != size) else { return goal };
        let change = available as f64 / last.available.max(1) as f64 - 1.0;
        match size < last.size {
            true if change < -CHANGED => Why::LessMemory,
            false if change > CHANGED => Why::MoreMemory,
            _ if self.goal == Goal::Largest => Why::Corrected,
            _ => goal,
        }
    }

    /// Records the rate of micro-batches of this size.
    pub(crate) fn observe_rate(&mut self, size: usize, rate: f64) {
        let best = self.rates.best(usize::MAX).map_or(0.0, |(_, rate)| rate);
        self.rates.observe(size, rate);
        if !self.climb.over {
            self.climb.rung = self.climb.rung.max(size);
            self.climb.misses = if rate > best * FASTER_FACTOR { 0 } else { self.climb.misses + 1 };
            // One miss may be a plateau between two kernels; two in a row end the climb.
            self.climb.over = self.climb.misses >= 2;
        }
    }

    /// Records a successful step; `size` is the last size of the step, and `retried` says whether the allocator
    /// had to empty its cache for it.
    pub(crate) fn succeeded(&mut self, size: usize, available: u64, retried: bool) {
        self.steps += u32::from(!self.held);
        self.failures.succeeded(size, available, retried);
    }

    /// Records that memory ran out and that the step is not retried.
    pub(crate) fn given_up(&mut self) {
        self.failures.given_up();
    }

    /// Records that memory ran out.
    pub(crate) fn failed(&mut self, size: usize, available: u64) {
        let cap = self.failures.failed(size, available, self.fitted);
        self.climb.over = true;
        self.climb.bound = Some(cap);
    }
}

/// After 100 steps without a failure, a size that failed is tried again, once: a second failure then costs
/// one step in 100.
const CALM_STEPS: u32 = 100;
/// Consecutive steps in which the allocator empties its cache before the size is lowered.
const THRASHING_STEPS: u32 = 2;
/// Relative change from which free memory counts as changed: smaller differences are noise.
const CHANGED: f64 = 0.02;

/// Failures of one kind of mini-batch.
#[derive(Debug, Clone, Default)]
struct Failures {
    ceiling: Option<Ceiling>,
    in_a_row: u32,
    calm_steps: u32,
    thrashing_steps: u32,
}

/// Size that failed.
#[derive(Debug, Clone, Copy)]
struct Ceiling {
    size: usize,
    /// Largest size allowed since the failure.
    cap: usize,
    /// Largest size known to fit at the failure.
    fitted: usize,
    /// Bytes free at the failure.
    available: u64,
    why: Why,
    /// Whether the failed size was tried again after calm steps, which happens once.
    tried_again: bool,
    /// Whether the failed size is being tried again.
    lifted: bool,
}

impl Failures {
    /// Returns the largest size that the failures allow.
    fn cap(&self) -> usize {
        match self.ceiling {
            Some(ceiling) if !ceiling.lifted => ceiling.cap,
            _ => usize::MAX,
        }
    }

    /// Drops the ceiling if more memory is free, or lifts it after calm steps. Called before each decision.
    fn review(&mut self, available: u64) {
        let Some(ceiling) = &mut self.ceiling else { return };
        let changed = available as f64 > ceiling.available as f64 * (1.0 + CHANGED);
        // If more memory is free than at the failure, the failure says nothing about the present. A step that is
        // being retried keeps its ceiling: otherwise another process that takes and frees memory by turns could
        // make the step retry without end.
        if changed && self.in_a_row == 0 {
            self.ceiling = None;
        } else if self.calm_steps >= CALM_STEPS && !ceiling.tried_again {
            ceiling.tried_again = true;
            ceiling.lifted = true;
        }
    }

    /// Returns the reason for this size, if a failure is the reason.
    fn reason(&self, size: usize) -> Option<Why> {
        match self.ceiling? {
            ceiling if ceiling.lifted => (size >= ceiling.size).then_some(Why::Calm),
            ceiling => (size >= ceiling.cap).then_some(ceiling.why),
        }
    }

    /// Records a successful step; `retried` says whether the allocator had to empty its cache for it.
    fn succeeded(&mut self, size: usize, available: u64, retried: bool) {
        self.calm_steps += 1;
        self.in_a_row = 0;
        match &mut self.ceiling {
            Some(ceiling) if size >= ceiling.size => self.ceiling = None,
            // The memory model has learnt from this step what it did not know at the failure.
            Some(ceiling) if size > ceiling.fitted => ceiling.cap = below(ceiling.size),
            _ => {}
        }
        self.thrashing_steps = if retried { self.thrashing_steps + 1 } else { 0 };
        if self.thrashing_steps >= THRASHING_STEPS {
            self.thrashing_steps = 0;
            self.limit(size, below(size), size, available, Why::Thrash);
        }
    }

    /// Records that memory ran out; `fitted` is the largest size known to fit. Returns the largest size
    /// allowed from now on.
    fn failed(&mut self, size: usize, available: u64, fitted: usize) -> usize {
        self.in_a_row += 1;
        let cap = match self.in_a_row {
            // The memory model was wrong: go half way back to the largest size known to fit.
            1 if fitted < size => (fitted + size) / 2,
            // The size has fitted before, so little is missing.
            1 => below(size),
            // Small corrections do not help; halving ends soon, however much is missing.
            _ => size / 2,
        };
        let cap = cap.clamp(1, below(size));
        self.limit(size, cap, fitted, available, Why::BackOff);
        cap
    }

    /// Records that the step was given up: the next one starts a new count of failures.
    fn given_up(&mut self) {
        self.in_a_row = 0;
    }

    fn limit(&mut self, size: usize, cap: usize, fitted: usize, available: u64, why: Why) {
        let tried_again = self.ceiling.is_some_and(|before| before.tried_again);
        self.calm_steps = 0;
        let ceiling = Ceiling { size, cap, fitted, available, why, tried_again, lifted: false };
        self.ceiling = Some(ceiling);
    }
}

/// Returns a size that is smaller by an eighth, and by at least one sample.
fn below(size: usize) -> usize {
    (size - (size / 8).max(1)).max(1)
}
