//! What failures leave: a ceiling, dropped when memory has come free, tried again once after calm steps.

use super::decision::Why;

/// After 100 steps without a failure, what failed once is tried again, once: a failure
/// then costs one step in 100.
const CALM_STEPS: u32 = 100;
/// Steps in a row in which the allocator emptied its cache before the size is lowered.
const THRASHING_STEPS: u32 = 2;
/// Free memory has changed where it differs by over 2 %: less comes and goes by itself.
pub(super) const CHANGED: f64 = 0.02;

/// The failures of one kind of mini-batch.
#[derive(Debug, Clone, Default)]
pub(super) struct Failures {
    ceiling: Option<Ceiling>,
    in_a_row: u32,
    calm_steps: u32,
    thrashing_steps: u32,
}

/// A size that failed.
#[derive(Debug, Clone, Copy)]
struct Ceiling {
    size: usize,
    /// What is allowed since.
    cap: usize,
    /// The largest size that was known to fit then.
    fitted: usize,
    /// Bytes that were free then.
    available: u64,
    why: Why,
    /// Whether it was tried again after calm steps: that is done once.
    tried_again: bool,
    /// Whether it is being tried again.
    lifted: bool,
}

impl Failures {
    /// The most that they leave.
    pub(super) fn cap(&self) -> usize {
        match self.ceiling {
            Some(ceiling) if !ceiling.lifted => ceiling.cap,
            _ => usize::MAX,
        }
    }

    /// A decision is due: drops the ceiling where more memory is free, or lifts it.
    pub(super) fn review(&mut self, available: u64) {
        let Some(ceiling) = &mut self.ceiling else { return };
        let changed = available as f64 > ceiling.available as f64 * (1.0 + CHANGED);
        // More memory than at the failure: what failed then tells nothing now. Not while the step that failed
        // is run again: beside somebody who takes memory and gives it back, it would be without end.
        if changed && self.in_a_row == 0 {
            self.ceiling = None;
        } else if self.calm_steps >= CALM_STEPS && !ceiling.tried_again {
            ceiling.tried_again = true;
            ceiling.lifted = true;
        }
    }

    /// Why they are the reason for this size, if they are.
    pub(super) fn reason(&self, size: usize) -> Option<Why> {
        match self.ceiling? {
            ceiling if ceiling.lifted => (size >= ceiling.size).then_some(Why::Calm),
            ceiling => (size >= ceiling.cap).then_some(ceiling.why),
        }
    }

    /// A step has succeeded; `retried` says whether the allocator had to empty its cache for it.
    pub(super) fn succeeded(&mut self, size: usize, available: u64, retried: bool) {
        self.calm_steps += 1;
        self.in_a_row = 0;
        match &mut self.ceiling {
            Some(ceiling) if size >= ceiling.size => self.ceiling = None,
            // What the model lacked when it failed, it has learnt from this.
            Some(ceiling) if size > ceiling.fitted => ceiling.cap = below(ceiling.size),
            _ => {}
        }
        self.thrashing_steps = if retried { self.thrashing_steps + 1 } else { 0 };
        if self.thrashing_steps >= THRASHING_STEPS {
            self.thrashing_steps = 0;
            self.limit(size, below(size), size, available, Why::Thrash);
        }
    }

    /// Memory ran out; `fitted` is the largest size that is known to have fitted. Gives what is
    /// allowed from now on.
    pub(super) fn failed(&mut self, size: usize, available: u64, fitted: usize) -> usize {
        self.in_a_row += 1;
        let cap = match self.in_a_row {
            // The model was wrong: half way back to what is known.
            1 if fitted < size => (fitted + size) / 2,
            // It has fitted before, so little is missing.
            1 => below(size),
            // Small corrections do not help: halving ends soon, whatever is missing.
            _ => size / 2,
        };
        let cap = cap.clamp(1, below(size));
        self.limit(size, cap, fitted, available, Why::BackOff);
        cap
    }

    /// The step was given up: the next one begins anew.
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

/// A little less, at least one sample's.
fn below(size: usize) -> usize {
    (size - (size / 8).max(1)).max(1)
}
