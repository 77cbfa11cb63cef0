//! Predicts the need of a micro-batch of n samples from measured needs: fixed + per sample × n.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Line through measured needs: bytes over samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) fixed: f64,
    pub(crate) per_sample: f64,
}

impl Line {
    pub(crate) fn at(&self, samples: usize) -> u64 {
        (self.fixed + self.per_sample * samples as f64).max(0.0) as u64
    }

    /// Returns the largest number of samples whose need is within the budget; 0 if the fixed part exceeds the
    /// budget.
    pub(crate) fn largest(&self, budget: u64) -> usize {
        let left = budget as f64 - self.fixed;
        if left <= 0.0 { 0 } else { (left / self.per_sample) as usize }
    }
}

/// Model of the needs in one memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryModel {
    /// Last measured need of each size, in bytes.
    needs: BTreeMap<usize, u64>,
    /// Line to use while nothing has been measured.
    prior: Option<Line>,
    /// Lower bound on the fixed part, in bytes: the gradients of earlier micro-batches.
    floor: u64,
}

/// Two sizes give a slope only if the smaller is at most 3/4 of the larger: closer sizes may differ by no
/// more than an allocator's rounding.
const SLOPE_MAX_RATIO: f64 = 0.75;
/// Needs of one size vary by up to an eighth with the other contents of the memory.
const NOISE_FACTOR: f64 = 1.125;

/// The line is extrapolated to at most 8 times the largest measured size.
const EXTRAPOLATE_FACTOR: usize = 8;
/// The line is extrapolated that far only if it predicts at least 4 times the need there: then samples, not
/// the fixed part, make up most of the measured need, and the slope is reliable.
const EXTRAPOLATE_MIN_GROWTH: u64 = 4;
/// Needs have a bend at the size from which a sample costs over 1.5 times its cost at smaller sizes.
const BEND_FACTOR: f64 = 1.5;

impl MemoryModel {
    /// Returns a model whose fixed part is at least `floor` bytes.
    pub(crate) fn with_floor(floor: u64) -> Self {
        Self { floor, ..Self::default() }
    }

    /// Returns a model that starts from a predicted line.
    pub(crate) fn with_prior(prior: Line, floor: u64) -> Self {
        Self { prior: Some(prior), floor, ..Self::default() }
    }

    /// Records the need of a micro-batch. A lone micro-batch has no gradients beside it, so the floor is
    /// added.
    pub(crate) fn observe(&mut self, size: usize, bytes: u64, alone: bool) {
        let beside = if alone { self.floor } else { 0 };
        self.needs.insert(size, bytes.saturating_add(beside));
    }

    pub(crate) fn forget_above(&mut self, size: usize) {
        self.needs.retain(|&other, _| other <= size);
    }

    /// Returns the largest measured size; 0 at first.
    pub(crate) fn largest_seen(&self) -> usize {
        self.needs.last_key_value().map_or(0, |(&size, _)| size)
    }

    /// Returns the largest size that the line may be extrapolated to. This size is not far above the measured ones
    /// while needs hardly grow, because the fixed part then hides the samples' part. [`MemoryModel::sure`] is safe
    /// in any case.
    pub(crate) fn reach(&self, budget: u64) -> usize {
        let Some((&large, &most)) = self.needs.last_key_value() else { return 0 };
        let far = large.saturating_mul(EXTRAPOLATE_FACTOR);
        let grown = most.saturating_mul(EXTRAPOLATE_MIN_GROWTH);
        let bent = self.is_bent();
        if !bent && self.predict(far).is_some_and(|need| need >= grown) {
            return far;
        }
        // Beyond a bend the slope is not measured yet: only a quarter is added. Without a bend, doubling is safe
        // enough, because a failure costs one retry.
        let near = if bent { large + large / 4 } else { large.saturating_mul(2) };
        self.sure(budget).max(near)
    }

    /// Returns the largest size that fits in the worst case, in which all measured bytes above the floor
    /// grow with the samples.
    pub(crate) fn sure(&self, budget: u64) -> usize {
        let Some((&large, &most)) = self.needs.last_key_value() else { return 0 };
        let floor = self.floor.min(most) as f64;
        let at_most = Line { fixed: floor, per_sample: (most as f64 - floor) / large as f64 };
        at_most.largest(budget)
    }

    /// Returns whether needs grow faster towards the largest size than below it: then a new cost has begun
    /// somewhere on the way, and its slope is not known yet.
    fn is_bent(&self) -> bool {
        let mut points: Vec<(f64, f64)> = Vec::new();
        for (&size, &need) in self.needs.iter().rev() {
            if points.last().is_none_or(|(larger, _)| size as f64 <= larger * SLOPE_MAX_RATIO) {
                points.push((size as f64, need as f64));
            }
        }
        let slope = |a: (f64, f64), b: (f64, f64)| (a.1 - b.1) / (a.0 - b.0);
        matches!(points[..], [a, b, c, ..] if slope(a, b) > BEND_FACTOR * slope(b, c).max(0.0))
    }

    /// Returns the line through the largest measured size and the next one well below it. The largest sizes are
    /// used because needs are linear only from some size on.
    pub(crate) fn line(&self) -> Option<Line> {
        let Some((&large, &most)) = self.needs.last_key_value() else { return self.prior };
        let apart = |size: usize| (size as f64) <= large as f64 * SLOPE_MAX_RATIO;
        // If a size needed much more than a larger one, other data were in memory when it was measured.
        let sound = |need: u64| need as f64 <= most as f64 * NOISE_FACTOR;
        let below = self.needs.iter().rev().find(|&(&size, &need)| apart(size) && sound(need));
        // With one size alone the fixed part is a guess: that of a known shape, or the floor.
        let (size, least) = match (below, &self.prior) {
            (Some((&small, &least)), _) => (small, least as f64),
            (None, Some(prior)) => (0, prior.fixed.min(most as f64)),
            (None, None) => (0, self.floor.min(most) as f64),
        };
        let per_sample = ((most as f64 - least) / (large - size) as f64).max(0.0);
        Some(Line { fixed: most as f64 - per_sample * large as f64, per_sample })
    }

    pub(crate) fn predict(&self, size: usize) -> Option<u64> {
        self.line().map(|line| line.at(size))
    }

    /// Returns the largest size predicted to fit the budget.
    pub(crate) fn largest(&self, budget: u64) -> Option<usize> {
        let largest = self.line()?.largest(budget).min(self.largest_as_measured(budget));
        Some(match self.only_size() {
            // A second size, far enough from the first, is worth the risk of a failure: without it the
            // fixed part and a sample's part cannot be separated.
            Some((size, need)) if need <= budget => {
                largest.max((size as f64 / SLOPE_MAX_RATIO).ceil() as usize)
            }
            _ => largest,
        })
    }

    /// Returns the largest size that the measured needs allow. If the need of a measured size exceeds the budget,
    /// interpolating between the needs on both sides of the budget is more accurate than the line through the
    /// largest sizes.
    fn largest_as_measured(&self, budget: u64) -> usize {
        // If a size needed more than a larger one, other data were in memory when it was measured.
        let mut sound: Vec<(f64, f64)> = Vec::new();
        for (&size, &need) in self.needs.iter().rev() {
            if sound.last().is_none_or(|(_, above)| need as f64 <= *above) {
                sound.push((size as f64, need as f64));
            }
        }
        sound.reverse();
        let budget = budget as f64;
        let Some(at) = sound.iter().position(|(_, need)| *need > budget) else { return usize::MAX };
        let (lower, upper) = match (at, sound.len()) {
            (0, 1) => return usize::MAX,
            (0, _) => (sound[0], sound[1]),
            _ => (sound[at - 1], sound[at]),
        };
        let slope = (upper.1 - lower.1) / (upper.0 - lower.0);
        (lower.0 + (budget - lower.1) / slope.max(f64::MIN_POSITIVE)).max(0.0) as usize
    }

    /// Returns the only measured size and its need; `None` if there is a second size or a prior.
    fn only_size(&self) -> Option<(usize, u64)> {
        match (self.needs.len(), self.needs.first_key_value()) {
            (1, Some((&size, &need))) if self.prior.is_none() => Some((size, need)),
            _ => None,
        }
    }

    /// Returns whether all samples of a mini-batch fit as a single micro-batch, which has no gradients beside it.
    pub(crate) fn holds_all(&self, samples: usize, budget: u64) -> bool {
        self.largest(budget.saturating_add(self.floor)).is_some_and(|size| size >= samples)
    }

    /// Predicts the need of a lone micro-batch.
    pub(crate) fn predict_alone(&self, size: usize) -> Option<u64> {
        self.predict(size).map(|need| need.saturating_sub(self.floor))
    }
}

/// Predicts the line for samples of `elements` elements from the lines of other lengths.
///
/// The cost of a sample may grow with a power of its number of elements, as attention's does. Lines of two lengths
/// determine the power; the line of a single length is scaled linearly.
pub(crate) fn predict_line(known: &[(u64, Line)], elements: u64) -> Option<Line> {
    let distance = |(e, _): &&(u64, Line)| (*e as f64 / elements as f64).ln().abs();
    let mut nearest: Vec<&(u64, Line)> = known.iter().collect();
    nearest.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
    let (e, line) = nearest.first()?;
    let other = nearest.iter().find(|(other, line)| other != e && line.per_sample > 0.0);
    // The power is at most 2: attention's cost grows with the square of the length, and no common layer's
    // grows faster. A higher power would be noise, and would be extrapolated.
    let power = other.map_or(1.0, |(other, with)| {
        let power = (line.per_sample / with.per_sample).ln() / (*e as f64 / *other as f64).ln();
        if power.is_finite() { power.clamp(0.0, 2.0) } else { 1.0 }
    });
    let per_sample = line.per_sample * (elements as f64 / *e as f64).powf(power);
    Some(Line { fixed: line.fixed, per_sample })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_is_known_at_first() {
        let model = MemoryModel::default();
        assert_eq!((model.predict(3), model.largest(100), model.largest_seen()), (None, None, 0));
    }

    #[test]
    fn a_line_with_a_bend_is_not_trusted_far() {
        let mut model = MemoryModel::with_floor(4000);
        let needs = [(55, 8233), (158, 8645), (410, 12209)];
        needs.into_iter().for_each(|(n, need)| model.observe(n, need, false));
        assert_eq!(model.reach(16_609), 629, "all above the floor may be the samples'");
        model.observe(586, 15_721, false);
        assert!(model.reach(16_609) > 800, "the last two tell the same: {}", model.reach(16_609));
    }

    #[test]
    fn a_small_size_that_needed_more_than_a_large_one_tells_nothing() {
        let mut model = MemoryModel::default();
        [(2, 30), (40, 700), (70, 600)]
            .into_iter()
            .for_each(|(n, need)| model.observe(n, need, false));
        let line = model.line().expect("three sizes were seen");
        assert!((line.per_sample - 570.0 / 68.0).abs() < 1e-9, "{line:?}");
    }

    #[test]
    fn one_size_is_taken_to_be_all_samples() {
        let mut model = MemoryModel::default();
        model.observe(2, 100, false);
        assert_eq!((model.predict(4), model.largest(199)), (Some(200), Some(3)));
        assert_eq!(model.largest(101), Some(3), "to learn what a sample needs");
        assert_eq!(model.largest(99), Some(1));
        model.observe(3, 101, false);
        assert_eq!(model.largest(105), Some(7));
    }

    #[test]
    fn a_prior_gives_way_to_what_is_seen() {
        let mut model = MemoryModel::with_prior(Line { fixed: 50.0, per_sample: 10.0 }, 0);
        assert_eq!(model.largest(100), Some(5));
        model.observe(10, 250, false);
        assert_eq!((model.predict(20), model.largest(450)), (Some(450), Some(20)));
    }

    #[test]
    fn a_fixed_part_above_the_budget_leaves_nothing() {
        let mut model = MemoryModel::default();
        model.observe(2, 120, false);
        model.observe(4, 140, false);
        assert_eq!(model.largest(99), Some(0));
    }

    #[test]
    fn needs_that_do_not_grow_do_not_limit() {
        let mut model = MemoryModel::default();
        model.observe(2, 100, false);
        model.observe(4, 90, false);
        assert!(model.largest(100).is_some_and(|size| size > 1 << 40));
    }

    #[test]
    fn a_line_is_trusted_only_where_it_climbs() {
        let mut model = MemoryModel::default();
        model.observe(4, 400, false);
        assert_eq!((model.reach(10_000), model.sure(10_000)), (32, 100));
        model.observe(8, 410, false);
        assert_eq!(model.reach(450), 16);
        assert_eq!(model.reach(4_100), 80, "if all were the samples'");
    }

    #[test]
    fn what_is_known_to_be_fixed_is_not_the_samples() {
        let mut model = MemoryModel::with_floor(100);
        model.observe(2, 120, false);
        assert_eq!((model.predict(4), model.largest(200)), (Some(140), Some(10)));
        model.observe(4, 120, false);
        assert_eq!(model.reach(300), 40);
    }

    #[test]
    fn a_single_micro_batch_has_no_gradients_beside_it() {
        let mut model = MemoryModel::with_floor(100);
        model.observe(5, 150, false);
        model.observe(10, 200, false);
        assert_eq!(model.largest(200), Some(10));
        assert!(model.holds_all(20, 200) && !model.holds_all(21, 200));
        model.observe(20, 200, true);
        assert_eq!((model.predict_alone(20), model.predict(20)), (Some(200), Some(300)));
    }

    #[test]
    fn attention_is_known_by_its_power() {
        let line = |per_sample| Line { fixed: 5.0, per_sample };
        let known = [(128, line(1e3)), (256, line(4e3))];
        let predicted = predict_line(&known, 512).expect("two are known");
        assert!((predicted.per_sample - 16e3).abs() < 1e-6, "{predicted:?}");
        let one = predict_line(&known[..1], 512).expect("one is known");
        assert_eq!(one, line(4e3));
        assert_eq!(predict_line(&[], 512), None);
    }

    proptest! {
        #[test]
        fn a_straight_line_is_found_and_kept(
            fixed in 0_u64..1 << 30, slope in 1_u64..1 << 20, sizes in proptest::collection::vec(1_usize..2000, 2..6),
        ) {
            let mut model = MemoryModel::default();
            for &size in &sizes {
                model.observe(size, fixed + slope * size as u64, false);
            }
            let (smallest, largest) = (sizes.iter().min(), sizes.iter().max());
            if smallest.zip(largest).is_some_and(|(s, l)| (*s as f64) <= *l as f64 * SLOPE_MAX_RATIO) {
                let budget = fixed + slope * 5000 + slope / 2;
                prop_assert_eq!(model.largest(budget), Some(5000));
            }
        }

        #[test]
        fn no_input_panics(
            seen in proptest::collection::vec((1_usize..1 << 40, any::<u64>()), 0..5), budget in any::<u64>(),
            known in proptest::collection::vec((any::<u64>(), -1e9..1e18, -1e9..1e18), 0..4), elements in any::<u64>(),
        ) {
            let mut model = MemoryModel::default();
            seen.iter().for_each(|&(size, bytes)| model.observe(size, bytes, false));
            let _ = (model.largest(budget), model.predict(usize::MAX));
            let known: Vec<_> = known.into_iter().map(|(e, fixed, per_sample)| (e, Line { fixed, per_sample })).collect();
            if let Some(line) = predict_line(&known, elements) {
                let _ = (line.largest(budget), line.at(usize::MAX));
            }
        }
    }
}
