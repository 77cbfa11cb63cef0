//! Keeps a ceiling on the size after failures: lifted once after calm steps, dropped when memory becomes
//! free.

use super::decision::Why;

/// After 100 steps without a failure, a size that failed is tried again, once: a second failure then costs
/// one step in 100.
const CALM_STEPS: u32 = 100;
/// Consecutive steps in which the allocator empties its cache before the size is lowered.
const THRASHING_STEPS: u32 = 2;
/// Relative change from which free memory counts as changed: smaller differences are noise.
pub(super) const CHANGED: f64 = 0.02;

/// Failures of one kind of mini-batch.
#[derive(Debug, Clone, Default)]
pub(super) struct Failures {
    ceiling: Option<Ceiling>,
    in_a_row: u32,
    calm_steps: u32,
    thrashing_steps: u32,
}

/// Size that failed.
#[derive(Debug, Clone, Copy)]
struct Ceiling {
    size: usize,
    /// Largest size allowed since.
    cap: usize,
    /// Largest size known to fit at the time.
    fitted: usize,
    /// Bytes free at the time.
    available: u64,
    why: Why,
    /// Whether it was tried again after calm steps, which happens once.
    tried_again: bool,
    /// Whether it is being tried again.
    lifted: bool,
}

impl Failures {
    /// Returns the largest size that the failures allow.
    pub(super) fn cap(&self) -> usize {
        match self.ceiling {
            Some(ceiling) if !ceiling.lifted => ceiling.cap,
            _ => usize::MAX,
        }
    }

    /// Drops the ceiling where more memory is free, or lifts it after calm steps. Called before each
    /// decision.
    pub(super) fn review(&mut self, available: u64) {
        let Some(ceiling) = &mut self.ceiling else { return };
        let changed = available as f64 > ceiling.available as f64 * (1.0 + CHANGED);
        // With more memory than at the failure, the failure says nothing about now. A step that is being
        // retried keeps its ceiling: beside a process that takes memory and gives it back, it would retry
        // without end.
        if changed && self.in_a_row == 0 {
            self.ceiling = None;
        } else if self.calm_steps >= CALM_STEPS && !ceiling.tried_again {
            ceiling.tried_again = true;
            ceiling.lifted = true;
        }
    }

    /// Returns the reason for this size, if a failure is the reason.
    pub(super) fn reason(&self, size: usize) -> Option<Why> {
        match self.ceiling? {
            ceiling if ceiling.lifted => (size >= ceiling.size).then_some(Why::Calm),
            ceiling => (size >= ceiling.cap).then_some(ceiling.why),
        }
    }

    /// Records a successful step; `retried` says whether the allocator had to empty its cache for it.
    pub(super) fn succeeded(&mut self, size: usize, available: u64, retried: bool) {
        self.calm_steps += 1;
        self.in_a_row = 0;
        match &mut self.ceiling {
            Some(ceiling) if size >= ceiling.size => self.ceiling = None,
            // The model has learnt from this step what it lacked at the failure.
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
    pub(super) fn failed(&mut self, size: usize, available: u64, fitted: usize) -> usize {
        self.in_a_row += 1;
        let cap = match self.in_a_row {
            // The model was wrong: go half way back to the largest size known to fit.
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
    pub(super) fn given_up(&mut self) {
        self.in_a_row = 0;
    }

    fn limit(&mut self, size: usize, cap: usize, fitted: usize, available: u64, why: Why) {
        let tried_again = self.ceiling.is_some_and(|before| before.tried_again);
        self.calm_steps = 0;
        let ceiling = Ceiling { size, cap, fitted, available, why, tried_again, lifted: false };
        self.ceiling = Some(ceiling);
    }
}

/// Returns a slightly smaller size, by at least one sample.
fn below(size: usize) -> usize {
    (size - (size / 8).max(1)).max(1)
}
