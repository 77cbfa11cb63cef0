//! Tests the search for a size in a simulated world: needs and rates are formulas, time and memory numbers.

use proptest::prelude::*;

use super::decision::{Why, in_near_equal_parts};
use super::policy::Goal;
use super::sizer::{FreeMemory, Sizer};

/// Simulated device.
#[derive(Debug, Clone)]
struct World {
    samples: usize,
    available: u64,
    fixed: u64,
    per_sample: u64,
    /// Size at which a sample takes the least time.
    fastest: f64,
    sizer: Sizer,
    /// Size from which on memory runs out, unknown to the memory model.
    surprise: usize,
    /// Bytes that another process takes while micro-batches run, and gives back between them.
    taken: u64,
    failures: usize,
}

impl World {
    fn new(goal: Goal, samples: usize, available: u64) -> Self {
        Self {
            samples,
            available,
            fixed: 1000,
            per_sample: 100,
            fastest: 64.0,
            sizer: Sizer::new(goal, &[0]),
            surprise: usize::MAX,
            taken: 0,
            failures: 0,
        }
    }

    fn need(&self, size: usize) -> u64 {
        self.fixed + self.per_sample * size as u64
    }

    /// Returns the rate in samples a second: an overhead for each micro-batch, and a cost of large ones.
    fn rate(&self, size: usize) -> f64 {
        let n = size as f64;
        1e3 / (1.0 + self.fastest / n + n / self.fastest)
    }

    fn free_memory(&self) -> FreeMemory {
        free_memory_of(self.available)
    }

    /// Runs a mini-batch until it succeeds; returns the last size and its reason.
    fn step(&mut self) -> (usize, Why) {
        'again: loop {
            let (mut left, mut last) = (self.samples, (0, Why::Probe));
            while left > 0 {
                let trial = self.sizer.next(&[self.free_memory()], left, self.samples);
                last = (trial.size, trial.why);
                let run = trial.size.min(left);
                let free = self.available - self.taken;
                if self.need(run) > free || run >= self.surprise {
                    self.failures += 1;
                    assert!(trial.size > 1 && self.failures < 50, "no end: {self:?}");
                    self.sizer.failed(trial.size, &[free_memory_of(free)]);
                    continue 'again;
                }
                let all = left.div_ceil(trial.size);
                let count = trial.micro_batches.unwrap_or(all).min(all);
                let size = match trial.micro_batches {
                    Some(_) => run,
                    None => in_near_equal_parts(left, trial.size),
                };
                self.sizer.observe_needs(size, &[self.need(size)], false);
                if trial.timed {
                    self.sizer.observe_rate(size, self.rate(size));
                }
                left -= left.min(count * trial.size);
            }
            self.sizer.succeeded(last.0, &[self.free_memory()], false);
            return last;
        }
    }

    fn steps(&mut self, count: usize) {
        for _ in 0..count {
            self.step();
        }
    }

    fn largest_feasible(&self) -> usize {
        (((self.available - self.fixed) / self.per_sample) as usize).min(self.samples)
    }
}

fn free_memory_of(available: u64) -> FreeMemory {
    FreeMemory { available, budget: available - available / 100 }
}

#[test]
fn the_first_step_probes_climbs_and_ends_with_the_best_so_far() {
    let mut world = World::new(Goal::Fastest, 2048, 1 << 20);
    assert_eq!(world.step().1, Why::Fastest);
    let mut seen = Vec::new();
    for _ in 0..12 {
        seen.push(world.step());
    }
    assert_eq!(seen.last(), Some(&(64, Why::Fastest)), "{seen:?}");
}

#[test]
fn a_failure_lowers_the_size_and_calm_steps_raise_it_once_more() {
    let mut world = World::new(Goal::Largest, 10_000, 101_000);
    world.steps(3);
    let (before, _) = world.step();
    world.surprise = before - 10;
    let (lower, why) = world.step();
    assert!(lower < before && why == Why::BackOff, "{lower} after {before}: {why}");
    assert_eq!(world.failures, 1);
    world.steps(150);
    assert_eq!(world.failures, 2, "it is tried once more, after calm steps");
    world.steps(500);
    assert_eq!(world.failures, 2, "and that is remembered");
    world.surprise = usize::MAX;
    world.available += world.available / 10;
    let (higher, why) = world.step();
    assert!(higher > before && why == Why::MoreMemory, "{higher}: {why}");
}

#[test]
fn what_failed_by_chance_comes_back_after_calm_steps() {
    let mut world = World::new(Goal::Fastest, 4096, 1 << 20);
    world.steps(12);
    let (before, _) = world.step();
    let free_memory = [world.free_memory()];
    world.sizer.failed(before, &free_memory);
    assert!(world.step().0 < before);
    world.steps(150);
    assert_eq!(world.step(), (before, Why::Fastest));
    assert_eq!(world.failures, 0);
}

#[test]
fn the_size_follows_the_memory_both_ways() {
    for goal in [Goal::Fastest, Goal::Largest] {
        let mut world = World::new(goal, 4096, 20_000);
        world.steps(12);
        let (before, _) = world.step();
        world.available = 5_000;
        let (less, why) = world.step();
        assert!(
            less < before && world.need(less) <= 5_000 && why == Why::LessMemory,
            "{less} {why}"
        );
        world.available = 20_000;
        let (more, why) = world.step();
        assert!(more == before && why == Why::MoreMemory, "{more} after {before}: {why}");
        assert_eq!(world.failures, 0);
    }
}

#[test]
fn a_step_ends_beside_a_neighbour_whose_memory_comes_and_goes() {
    for goal in [Goal::Fastest, Goal::Largest] {
        let mut world = World::new(goal, 4096, 20_000);
        world.steps(12);
        let (before, _) = world.step();
        world.taken = 15_000;
        let (less, _) = world.step();
        assert!(less < before && world.need(less) <= 5_000, "{less} after {before}");
        world.taken = 0;
        assert_eq!(world.step().0, before, "what is free again is used by the next step");
    }
}

#[test]
fn two_thrashing_steps_in_a_row_lower_the_size() {
    let mut world = World::new(Goal::Largest, 4096, 101_000);
    world.steps(3);
    let (before, _) = world.step();
    let free_memory = [world.free_memory()];
    world.sizer.succeeded(before, &free_memory, true);
    assert_eq!(world.step().0, before, "one such step is nothing");
    world.sizer.succeeded(before, &free_memory, true);
    world.sizer.succeeded(before, &free_memory, true);
    let (lower, why) = world.step();
    assert!(lower < before && why == Why::Thrash, "{lower}: {why}");
}

#[test]
fn a_held_size_stays_and_the_search_goes_on_from_there() {
    let mut world = World::new(Goal::Fastest, 4096, 1 << 20);
    let (first, _) = world.step();
    world.sizer.hold(true);
    for _ in 0..12 {
        assert_eq!(world.step().0, first);
    }
    world.sizer.hold(false);
    // The fastest size may differ from one memory format to the other.
    let before = world.rate(first);
    world.fastest = 1000.0;
    world.sizer.rearranged(world.rate(first) / before);
    world.steps(10);
    let (size, why) = world.step();
    let whole = world.rate(in_near_equal_parts(4096, size));
    assert!(size > first && whole >= 0.97 * world.rate(1000), "{size}: {why}");
}

#[test]
fn sizes_leave_no_remainder_where_shapes_are_dear() {
    let mut world = World::new(Goal::Fastest, 2048, 1000 + 100 * 200);
    world.fastest = 1000.0;
    world.sizer.even(true);
    world.steps(12);
    assert_eq!(world.step(), (128, Why::Fastest), "not 187, which is nearer to the limit of 198");
}

proptest! {
    #[test]
    fn the_largest_size_is_found_with_at_most_one_failure(
        samples in 1_usize..5000, fixed in 0_u64..1 << 20, per_sample in 1_u64..1 << 16, fits in 1_u64..6000,
    ) {
        let mut world = World::new(Goal::Largest, samples, fixed + per_sample * fits.max(2));
        (world.fixed, world.per_sample) = (fixed, per_sample);
        // The margin is a part of all free memory: if the fixed part takes nearly all of it, no fixed share of the
        // rest can be promised.
        prop_assume!(per_sample * fits > fixed);
        world.steps(5);
        let (size, _) = world.step();
        let feasible = world.largest_feasible();
        prop_assert!(size * 100 >= feasible * 95 || size + 1 >= feasible, "{} of {}", size, feasible);
        prop_assert!(world.failures <= 1, "{} failures", world.failures);
    }

    #[test]
    fn the_fastest_size_is_found_within_ten_steps(
        samples in 64_usize..5000, fastest in 2.0_f64..2000.0, available in 3_000_u64..1 << 22,
    ) {
        let mut world = World::new(Goal::Fastest, samples, available);
        world.fastest = fastest;
        world.steps(10);
        let (size, _) = world.step();
        let whole = |size| world.rate(in_near_equal_parts(samples, size));
        // The margin stays unused, even if one size more would fit into it.
        let top = ((world.free_memory().budget - world.fixed) / world.per_sample) as usize;
        let best = (1..=top.min(samples)).map(whole).fold(0.0, f64::max);
        prop_assert!(whole(size) >= 0.97 * best, "size {}: {} of {}", size, whole(size), best);
        prop_assert!(world.failures == 0);
    }

    #[test]
    fn a_step_ends_whatever_fails(
        samples in 1_usize..300, failing in proptest::collection::vec(any::<bool>(), 1..20), largest in any::<bool>(),
    ) {
        let goal = if largest { Goal::Largest } else { Goal::Fastest };
        let mut world = World::new(goal, samples, 10_000_000);
        for fails in failing {
            let (size, _) = world.step();
            prop_assert!(size >= 1);
            if fails && size > 1 {
                let free_memory = [world.free_memory()];
                world.sizer.failed(size, &free_memory);
                let (lower, _) = world.step();
                prop_assert!(lower < size, "{} after {} failed", lower, size);
            }
        }
    }
}
