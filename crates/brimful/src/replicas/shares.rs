//! Divides a mini-batch among replicas, in proportion to their measured speeds.
//!
//! The first steps divide it evenly. Speeds are medians over the last steps, and the parts change only if a step
//! is expected to become at least 5 % faster: every change means new shapes, and other rounding errors in sums.

use std::collections::VecDeque;
use std::ops::Range;

use crate::batch::Samples;

/// Number of latest readings whose median is a replica's speed. The first step, which warms up, gives none.
const READINGS: usize = 5;
/// Number of readings of every replica before a change: the least whose median drops an outlier.
const MIN_READINGS: usize = 3;
/// Smallest expected speedup of a step for which the parts change: a smaller one may be noise.
const MIN_SPEEDUP: f64 = 1.05;

/// Speeds of the replicas.
#[derive(Debug, Clone)]
pub(super) struct Speeds {
    /// Speeds to which the parts are in proportion.
    current: Vec<f64>,
    /// Last readings of each replica, in samples a second; none if speeds were given.
    readings: Option<Vec<VecDeque<f64>>>,
    warm: bool,
}

impl Speeds {
    /// Creates equal speeds, which hold until speeds are measured.
    pub(super) fn even(replicas: usize) -> Self {
        let readings = Some(vec![VecDeque::new(); replicas]);
        Self { current: vec![1.0; replicas], readings, warm: false }
    }

    /// Creates speeds from these numbers, which no measurement changes.
    pub(super) fn given(speeds: &[f64]) -> Self {
        Self { current: speeds.to_vec(), readings: None, warm: true }
    }

    /// Returns each replica's samples. The first replica, which has the result, gets at least one
    /// if there are any.
    pub(super) fn shares(&self, samples: &Samples) -> Vec<Range<usize>> {
        let mut start = 0;
        let range = |length: usize| {
            start += length;
            start - length..start
        };
        let lengths = match samples.lengths() {
            None => apportioned(samples.count(), &self.current),
            Some(lengths) => apportioned_by_length(lengths, &self.current),
        };
        lengths.into_iter().map(range).collect()
    }

    /// Records a step: each replica's samples, and the seconds that they took.
    pub(super) fn observe(&mut self, step: impl Iterator<Item = (usize, Option<f64>)>) {
        let Some(readings) = &mut self.readings else { return };
        if !std::mem::replace(&mut self.warm, true) {
            return;
        }
        for (last, (samples, seconds)) in readings.iter_mut().zip(step) {
            let Some(seconds) = seconds.filter(|seconds| *seconds > 0.0) else { continue };
            last.push_back(samples as f64 / seconds);
            if last.len() > READINGS {
                last.pop_front();
            }
        }
        if readings.iter().any(|last| last.len() < MIN_READINGS) {
            return;
        }
        let measured: Vec<f64> = readings.iter().map(median).collect();
        // Seconds for one sample: a step ends with its slowest part; at best all parts end together.
        let whole: f64 = self.current.iter().sum();
        let parts = self.current.iter().zip(&measured);
        let now = parts.map(|(part, speed)| part / whole / speed).fold(0.0, f64::max);
        let best = 1.0 / measured.iter().sum::<f64>();
        if now > best * MIN_SPEEDUP {
            tracing::info!(samples_per_s = ?measured, "replicas get parts by their speeds");
            self.current = measured;
            // Readings with the old parts may not hold with the new ones.
            readings.iter_mut().for_each(VecDeque::clear);
        }
    }
}

fn median(readings: &VecDeque<f64>) -> f64 {
    let mut sorted: Vec<f64> = readings.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Divides samples in these proportions: rounds down, and gives the rest to the largest remainders.
fn apportioned(samples: usize, speeds: &[f64]) -> Vec<usize> {
    let whole: f64 = speeds.iter().sum();
    let exact: Vec<f64> = speeds.iter().map(|speed| samples as f64 * speed / whole).collect();
    let mut shares: Vec<usize> = exact.iter().map(|exact| exact.floor() as usize).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    let rest = |i: usize| exact[i] - exact[i].floor();
    order.sort_by(|&a, &b| rest(b).total_cmp(&rest(a)));
    let left = samples.saturating_sub(shares.iter().sum());
    order.into_iter().cycle().take(left).for_each(|i| shares[i] += 1);
    // The first replica's part gets the others' sums, so it always has a sample.
    if samples > 0
        && shares[0] == 0
        && let Some(largest) = (0..shares.len()).rev().max_by_key(|&i| shares[i])
    {
        shares[largest] -= 1;
        shares[0] += 1;
    }
    shares
}

/// Divides consecutive samples so that the parts' lengths are in these proportions.
fn apportioned_by_length(lengths: &[usize], speeds: &[f64]) -> Vec<usize> {
    let per_speed = lengths.iter().sum::<usize>() as f64 / speeds.iter().sum::<f64>();
    let mut shares = vec![0; speeds.len()];
    let mut replica = 0;
    let mut end = speeds[0] * per_speed;
    let mut before = 0.0;
    for &length in lengths {
        // A sample belongs to the part that has its middle; the first sample to the first replica.
        while replica + 1 < speeds.len() && before > 0.0 && before + length as f64 / 2.0 > end {
            replica += 1;
            end += speeds[replica] * per_speed;
        }
        shares[replica] += 1;
        before += length as f64;
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lengths(speeds: &Speeds, samples: usize) -> Vec<usize> {
        speeds.shares(&Samples::alike(samples)).into_iter().map(|range| range.len()).collect()
    }

    fn step(speeds: &mut Speeds, samples: usize, rates: &[f64]) {
        let shares = lengths(speeds, samples);
        let seconds =
            |(share, rate): (usize, &f64)| (share, (share > 0).then(|| share as f64 / rate));
        speeds.observe(shares.into_iter().zip(rates).map(seconds));
    }

    #[test]
    fn the_first_steps_are_even() {
        assert_eq!(lengths(&Speeds::even(3), 10), [4, 3, 3]);
        assert_eq!(lengths(&Speeds::even(3), 2), [1, 1, 0]);
        assert_eq!(lengths(&Speeds::even(2), 1), [1, 0]);
    }

    #[test]
    fn parts_follow_speeds_that_were_measured() {
        let mut speeds = Speeds::even(2);
        for _ in 0..=MIN_READINGS {
            assert_eq!(lengths(&speeds, 40), [20, 20]);
            step(&mut speeds, 40, &[10.0, 30.0]);
        }
        assert_eq!(lengths(&speeds, 40), [10, 30]);
    }

    #[test]
    fn like_devices_stay_even_whatever_the_noise() {
        let mut speeds = Speeds::even(2);
        for collective in 0..50 {
            let noise = [0.97, 1.0, 1.03, 1.01][collective % 4];
            step(&mut speeds, 64, &[100.0 * noise, 100.0 / noise]);
            assert_eq!(lengths(&speeds, 64), [32, 32]);
        }
    }

    #[test]
    fn the_first_replica_always_has_a_sample() {
        assert_eq!(lengths(&Speeds::given(&[1.0, 100.0]), 5), [1, 4]);
        assert_eq!(lengths(&Speeds::given(&[1.0, 100.0]), 1), [1, 0]);
    }

    #[test]
    fn parts_of_sequences_have_tokens_in_proportion() {
        let parts = |lengths: &[usize], speeds: &[f64]| apportioned_by_length(lengths, speeds);
        assert_eq!(parts(&[8, 4, 2, 2, 1, 1, 1, 1], &[1.0, 1.0]), [2, 6]);
        assert_eq!(parts(&[4, 4, 4, 4], &[1.0, 3.0]), [1, 3]);
        assert_eq!(parts(&[9, 1, 1], &[1.0, 100.0]), [1, 2]);
        assert_eq!(parts(&[5], &[1.0, 1.0, 1.0]), [1, 0, 0]);
    }

    proptest! {
        #[test]
        fn every_sample_is_in_one_part(
            samples in 1_usize..1000,
            speeds in prop::collection::vec(0.01_f64..100.0, 1..9),
        ) {
            let shares = Speeds::given(&speeds).shares(&Samples::alike(samples));
            prop_assert_eq!(shares[0].start, 0);
            prop_assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert_eq!(shares[shares.len() - 1].end, samples);
            prop_assert!(!shares[0].is_empty());
        }
    }
}
