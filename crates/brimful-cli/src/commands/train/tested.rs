//! Results of a run's tests: the best one, and whether the run still improves.

use brimful::save::Metadata;

/// Metadata keys of a saved run.
const BEST_LOSS: &str = "best-test-loss";
const BEST_STEP: &str = "best-step";
const SINCE_BEST: &str = "tests-since-best";
const LAST_STEP: &str = "tested-step";

/// Tests of a run so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct TestsSoFar {
    /// Lowest loss, and the step after which it was found.
    pub(super) best: Option<(f64, usize)>,
    /// Number of tests since then.
    pub(super) since_best: usize,
    /// Step of the last test.
    pub(super) last: Option<usize>,
}

impl TestsSoFar {
    /// Adds a test after `step` steps, and returns whether it is the best so far.
    pub(super) fn add(&mut self, loss: f64, step: usize) -> bool {
        self.last = Some(step);
        let better = self.best.is_none_or(|(best, _)| loss < best);
        if better {
            self.best = Some((loss, step));
            self.since_best = 0;
        } else {
            self.since_best += 1;
        }
        better
    }

    /// Returns whether the last `tests` tests were no better than the best.
    pub(super) fn stopped_improving(&self, tests: Option<usize>) -> bool {
        tests.is_some_and(|tests| self.since_best >= tests)
    }

    /// Returns the metadata for a saved run.
    pub(super) fn told(&self) -> Metadata {
        let mut told = Metadata::new();
        if let Some((loss, step)) = self.best {
            // Debug format, which parses back to the same bits.
            told.insert(BEST_LOSS.into(), format!("{loss:?}"));
            told.insert(BEST_STEP.into(), step.to_string());
            told.insert(SINCE_BEST.into(), self.since_best.to_string());
        }
        if let Some(step) = self.last {
            told.insert(LAST_STEP.into(), step.to_string());
        }
        told
    }

    /// Reads the metadata of a saved run; without any, there were no tests.
    pub(super) fn read(metadata: &Metadata) -> Self {
        let number = |key: &str| metadata.get(key)?.parse().ok();
        let loss = metadata.get(BEST_LOSS).and_then(|text| text.parse().ok());
        Self {
            best: loss.zip(number(BEST_STEP)),
            since_best: number(SINCE_BEST).unwrap_or(0),
            last: number(LAST_STEP),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_stops_after_so_many_tests_that_are_no_better() {
        let mut tests = TestsSoFar::default();
        let better = [0.5, 0.4, 0.4, f64::NAN].map(|loss| tests.add(loss, 7));
        assert_eq!(better, [true, true, false, false]);
        assert!(tests.stopped_improving(Some(2)) && !tests.stopped_improving(Some(3)));
        assert!(!tests.stopped_improving(None));
    }

    #[test]
    fn what_is_reported_is_what_is_read() {
        let mut tests = TestsSoFar::default();
        assert_eq!(TestsSoFar::read(&tests.told()), tests);
        tests.add(0.1 + 0.2, 40);
        tests.add(0.5, 60);
        assert_eq!(TestsSoFar::read(&tests.told()), tests);
    }
}
