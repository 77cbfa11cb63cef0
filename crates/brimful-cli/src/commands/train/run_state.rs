//! Progress of a run: its epochs and steps, the totals of the current epoch, the results of its tests, and the cut
//! of an epoch into mini-batches.

use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result};
use brimful::Bytes;
use brimful::auto::Decision;
use brimful::save::Metadata;
use brimful_report::Record;

use crate::saved_weights::EPOCH;

/// Metadata key of the steps done in the current epoch.
const STEP: &str = "step";
/// Metadata key of the part of the current epoch's mean loss that its steps contributed so far.
const LOSS: &str = "loss";
/// Metadata key of the peak learning rate.
const LEARNING_RATE: &str = "learning-rate";

/// Progress of a run, which a resumed run continues.
#[derive(Debug)]
pub(super) struct RunState {
    /// Epochs done.
    pub(super) epoch: usize,
    /// Totals of the current epoch.
    pub(super) running: Running,
    pub(super) tests: TestsSoFar,
    /// Peak learning rate.
    pub(super) rate: f64,
}

impl RunState {
    /// Returns the state of a run before its first step.
    pub(super) fn new(rate: f64) -> Self {
        Self { epoch: 0, running: Running::default(), tests: TestsSoFar::default(), rate }
    }

    /// Returns the metadata for a saved run.
    pub(super) fn told(&self) -> Metadata {
        let Self { epoch, running, tests, rate } = self;
        let mut told = tests.told();
        told.insert(EPOCH.into(), epoch.to_string());
        told.insert(STEP.into(), running.steps.to_string());
        // The Debug format parses back to the same bits.
        told.insert(LOSS.into(), format!("{:?}", running.loss));
        told.insert(LEARNING_RATE.into(), format!("{rate:?}"));
        told
    }

    /// Reads the metadata of a saved run. `rate` is the learning rate on the command line, if one is given.
    pub(super) fn read(metadata: &Metadata, rate: Option<f64>) -> Result<Self> {
        let epoch = number(metadata, EPOCH)?;
        let rate = rate.map_or_else(|| number(metadata, LEARNING_RATE), Ok)?;
        let (steps, loss) = (number(metadata, STEP)?, number(metadata, LOSS)?);
        let running = Running { steps, loss, ..Running::default() };
        Ok(Self { epoch, running, tests: TestsSoFar::read(metadata), rate })
    }
}

fn number<N: FromStr>(metadata: &Metadata, key: &str) -> Result<N> {
    let number = metadata.get(key).and_then(|text| text.parse().ok());
    number.with_context(|| format!("it does not store its {key}: was it written by --save?"))
}

/// Totals of an epoch so far.
#[derive(Debug, Default)]
pub(super) struct Running {
    /// Steps done.
    pub(super) steps: usize,
    /// Part of the epoch's mean loss that the done steps contribute.
    pub(super) loss: f64,
    pub(super) peak: Bytes,
    pub(super) retries: usize,
    /// Changes of an automatic size, with their reasons.
    pub(super) decisions: Vec<Decision>,
    /// Samples of the epoch that this process has trained on, and the time of their steps.
    samples: usize,
    time: Duration,
}

impl Running {
    /// Adds a step. `share` is the step's share of the epoch's samples, and `time` is the whole time of the step.
    pub(super) fn add(&mut self, step: &Record, share: f64, time: Duration) {
        self.steps += 1;
        self.samples += step.samples;
        self.time += time;
        self.loss += step.loss * share;
        self.peak = self.peak.max(step.peak());
        self.retries += step.retries;
        for decision in &step.decisions {
            let same = |last: &Decision| (last.size, last.why) == (decision.size, decision.why);
            if !self.decisions.last().is_some_and(same) {
                self.decisions.push(decision.clone());
            }
        }
    }

    /// Returns the samples per second, or 0 if no step has run.
    pub(super) fn samples_per_s(&self) -> f64 {
        if self.samples == 0 { 0.0 } else { self.samples as f64 / self.time.as_secs_f64() }
    }

    /// Returns the automatic size that was taken last.
    pub(super) fn size(&self) -> Option<usize> {
        self.decisions.last().map(|decision| decision.size)
    }
}

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
    /// Number of tests since the test with the lowest loss.
    pub(super) since_best: usize,
    /// Step of the last test.
    pub(super) last: Option<usize>,
}

impl TestsSoFar {
    /// Adds a test after `step` steps, and returns whether the test is the best so far.
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

    /// Returns whether none of the last `tests` tests found a new lowest loss.
    pub(super) fn stopped_improving(&self, tests: Option<usize>) -> bool {
        tests.is_some_and(|tests| self.since_best >= tests)
    }

    /// Returns the metadata for a saved run.
    pub(super) fn told(&self) -> Metadata {
        let mut told = Metadata::new();
        if let Some((loss, step)) = self.best {
            // The Debug format parses back to the same bits.
            told.insert(BEST_LOSS.into(), format!("{loss:?}"));
            told.insert(BEST_STEP.into(), step.to_string());
            told.insert(SINCE_BEST.into(), self.since_best.to_string());
        }
        if let Some(step) = self.last {
            told.insert(LAST_STEP.into(), step.to_string());
        }
        told
    }

    /// Reads the metadata of a saved run. Without these keys, there were no tests.
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

/// Cut of an epoch into mini-batches of one size, and a smaller mini-batch of the rest. One or more mini-batches
/// make a step. Ranges are computed on demand, because there may be too many steps to keep in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct EpochCut {
    samples: usize,
    /// Number of samples in a mini-batch, except the last.
    size: usize,
    /// Number of mini-batches in a step. The last step may have fewer.
    accumulate: usize,
}

impl EpochCut {
    /// Cuts `samples` samples into mini-batches of `batch_size`. If there are fewer samples, one mini-batch has
    /// them all.
    pub(super) fn new(samples: usize, batch_size: usize, accumulate: usize) -> Self {
        Self { samples, size: batch_size.clamp(1, samples.max(1)), accumulate }
    }

    pub(super) fn steps(&self) -> usize {
        self.batches().div_ceil(self.accumulate)
    }

    /// Returns the positions, in the epoch's order, of a step's mini-batches.
    pub(super) fn step(self, step: usize) -> impl Iterator<Item = Range<usize>> {
        let batches = self.batches_of(step)..self.batches_of(step + 1);
        batches.map(move |batch| self.first(batch)..self.first(batch + 1))
    }

    /// Returns the number of samples in the first `steps` steps.
    pub(super) fn samples_of(&self, steps: usize) -> usize {
        self.first(self.batches_of(steps))
    }

    /// Returns the number of samples in the largest mini-batch.
    pub(super) fn largest(&self) -> usize {
        self.size
    }

    fn batches(&self) -> usize {
        self.samples.div_ceil(self.size)
    }

    fn batches_of(&self, steps: usize) -> usize {
        (steps * self.accumulate).min(self.batches())
    }

    /// Returns the position at which a mini-batch begins.
    fn first(&self, batch: usize) -> usize {
        (batch * self.size).min(self.samples)
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

    #[test]
    fn an_epoch_is_cut_into_mini_batches_of_a_size_and_one_of_the_rest() {
        for (samples, size, accumulate) in
            [(1, 5, 1), (10, 3, 2), (65, 16, 2), (64, 16, 4), (7, 1, 3), (1437, 1000, 1)]
        {
            let cut = EpochCut::new(samples, size, accumulate);
            let places: Vec<_> = (0..samples).collect();
            let batches = places.chunks(size).map(|places| places[0]..places[0] + places.len());
            let batches: Vec<_> = batches.collect();
            let steps: Vec<Vec<_>> =
                (0..cut.steps()).map(|step| cut.step(step).collect()).collect();
            let expected: Vec<_> = batches.chunks(accumulate).map(<[_]>::to_vec).collect();
            assert_eq!(steps, expected, "{samples} by {size}");
            assert_eq!((cut.largest(), cut.samples_of(steps.len())), (batches[0].len(), samples));
            assert_eq!(cut.samples_of(1), steps[0].iter().map(Range::len).sum::<usize>());
        }
    }
}
