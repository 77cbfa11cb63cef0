//! Intervals at which a CUDA graph is compared with an eager run again.
//!
//! ```text
//!   step    0          1  2     4           8        16  …  every 256th
//!           captured   ✓  ✓     ✓           ✓        ✓
//! ```
//!
//! A host value that changes at every step is caught in the first step after the capture; one that changes
//! rarely is caught within 256 steps. A check compares one micro-batch of a step.

/// Number of checks in the first steps after a capture, one per step.
const FIRST: u32 = 2;
/// Largest number of steps between two checks: fewer than 1 % of micro-batches are checked in the long run.
const LONGEST: u64 = 256;
/// A graph that was right for this many steps before it was out of date is worth another capture.
const LASTING: u64 = 64;

/// Checks of a captured shape, by step number.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Trust {
    /// Step of the capture; `None` before it.
    captured: Option<u64>,
    /// Step of the last comparison that found replay and eager run alike.
    agreed: u64,
    checks: u32,
    gap: u64,
}

impl Trust {
    /// Records a capture in this step, whose trial found replay and eager run alike. A shape that was dropped to
    /// make room for a check, and is captured again, keeps its trust.
    pub(super) fn captured(self, step: u64) -> Self {
        let captured = self.captured.or(Some(step));
        Self { captured, agreed: step, gap: self.gap.max(1), ..self }
    }

    /// Records a check in this step that found replay and eager run alike.
    pub(super) fn confirmed(self, step: u64) -> Self {
        let checks = self.checks + 1;
        let gap = if checks < FIRST { 1 } else { (self.gap * 2).min(LONGEST) };
        Self { agreed: step, checks, gap, ..self }
    }

    pub(super) fn is_due(self, step: u64) -> bool {
        step >= self.agreed + self.gap
    }

    /// Returns the number of steps since the last comparison that found replay and eager run alike. All of these
    /// steps may be wrong.
    pub(super) fn unchecked(self, step: u64) -> u64 {
        step.saturating_sub(self.agreed + 1)
    }

    /// Returns whether a graph that is now out of date was right for long enough to be captured anew.
    pub(super) fn lasted(self, step: u64) -> bool {
        self.captured.is_some_and(|captured| step >= captured + LASTING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks(steps: u64) -> Vec<u64> {
        let mut trust = Trust::default().captured(0);
        let mut due = Vec::new();
        for step in 1..=steps {
            if trust.is_due(step) {
                due.push(step);
                trust = trust.confirmed(step);
            }
        }
        due
    }

    #[test]
    fn the_first_steps_are_all_checked_and_later_ones_ever_more_rarely() {
        assert_eq!(checks(70), [1, 2, 4, 8, 16, 32, 64]);
        let (early, late) = (checks(100_000).len(), checks(200_000).len());
        assert!((late - early) * 100 < 100_000, "{early} {late}");
    }

    #[test]
    fn what_may_have_been_wrong_is_what_was_not_checked() {
        let trust = Trust::default().captured(10);
        assert_eq!(trust.unchecked(11), 0);
        assert_eq!(trust.confirmed(11).unchecked(13), 1);
        assert!(!trust.lasted(73) && trust.lasted(74));
    }

    #[test]
    fn what_is_captured_again_is_checked_no_more_often() {
        let trust = (1..=20).fold(Trust::default().captured(0), Trust::confirmed);
        let again = trust.captured(30);
        assert!(!again.is_due(31) && again.is_due(30 + LONGEST) && again.lasted(64));
    }
}
