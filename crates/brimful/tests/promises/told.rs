//! Reported: a step's report has consistent sizes, shares, peaks, times and decisions.

use brimful::{MicroBatches, StepReport, World};

use crate::kinds::{Drawing, Engine, Make};
use crate::plain::{NORMED, SEVERAL, engine, own_sizes, reset, samples};

const SAMPLES: usize = 11;

pub fn holds(make: Make, world: &World) {
    for size in [MicroBatches::Samples(3), MicroBatches::Count(2), MicroBatches::Samples(50)] {
        let mut engine = engine(make, NORMED, size, world);
        let batch = samples(SAMPLES as i64, 10);
        let what = format!("{}, {size:?}", engine.about().name);
        let step = engine.backward(&batch, &SEVERAL.loss()).expect(&what);
        consistent(&*engine, &step, world, &what);
        assert_eq!(step.sizes, own_sizes(&*engine, SAMPLES), "{what}");
        assert!(step.decisions.is_empty() && step.retries == 0, "{what}: {step:?}");
    }
    let memories = engine(make, NORMED, MicroBatches::Auto, world).about().arenas.len();
    for size in [MicroBatches::Auto, MicroBatches::Largest] {
        for (rank, memory) in (0..world.size()).flat_map(|r| (0..memories).map(move |m| (r, m))) {
            for number in FAILING {
                let mut engine = engine(make, NORMED, size, world);
                automatic(&mut *engine, world, size, Failure { rank, memory, number });
            }
        }
    }
}

/// Allocations that fail: soon, in the midst, and late.
const FAILING: [u64; 3] = [4, 30, 90];

/// Allocation that fails, in one of a rank's memories.
#[derive(Debug, Clone, Copy)]
struct Failure {
    rank: usize,
    memory: usize,
    number: u64,
}

/// Checks the reported decisions of an automatic size, and its failures.
fn automatic(engine: &mut dyn Engine, world: &World, size: MicroBatches, failure: Failure) {
    let batch = samples(SAMPLES as i64, 10);
    for fails in [false, true, false] {
        let what = format!("{}, {size:?}, {failure:?}: {fails}", engine.about().name);
        reset(engine, NORMED);
        let arena = engine.about().arenas[failure.memory].clone();
        if fails && world.rank() == failure.rank {
            arena.fail_nth_allocation(failure.number);
        }
        let step = engine.backward(&batch, &SEVERAL.loss()).expect(&what);
        arena.fail_nth_allocation(0);
        consistent(engine, &step, world, &what);
        // A step may have fewer allocations, or the last ones outside the attempt's run.
        let is_soon = failure.number == FAILING[0];
        assert!(step.retries <= usize::from(fails), "{what}: {step:?}");
        assert!(!fails || !is_soon || step.retries == 1, "{what}: {step:?}");
        assert!(!engine.gradients().is_empty(), "{what}");
        let last = step.decisions.last().unwrap_or_else(|| panic!("{what}: {step:?}"));
        assert!(step.decisions.len() > step.retries, "{what}: {step:?}");
        if fails {
            assert!(step.sizes.iter().all(|one| *one <= last.size), "{what}: {step:?}");
        }
    }
}

fn consistent(engine: &dyn Engine, step: &StepReport, world: &World, what: &str) {
    let shares: Vec<usize> =
        engine.about().dealt(SAMPLES)[engine.about().own.clone()].iter().map(|p| p.len()).collect();
    assert_eq!((step.samples, &step.shares), (SAMPLES, &shares), "{what}");
    assert_eq!(step.sizes.iter().sum::<usize>(), shares.iter().sum::<usize>(), "{what}");
    assert!(step.sizes.iter().all(|size| *size > 0), "{what}: {:?}", step.sizes);
    assert!((step.terms.iter().sum::<f64>() - step.loss).abs() < 1e-12, "{what}");
    assert_eq!(step.terms.len(), 4, "{what}");
    let is_pipeline = engine.about().drawing == Drawing::ByLayer;
    let ranks_told = if is_pipeline { world.size() } else { 1 };
    assert_eq!(
        step.peaks.len(),
        engine.about().arenas.len() * ranks_told,
        "{what}: {:?}",
        step.peaks
    );
    assert!(step.peaks.iter().all(|peak| peak.is_some_and(|peak| peak.0 > 0)), "{what}");
    assert_eq!(step.peak(), step.peaks.iter().flatten().max().copied(), "{what}");
    assert_eq!(step.timeline.is_some(), is_pipeline, "{what}");
    assert_eq!(step.seed.is_some(), engine.about().drawing != Drawing::AsPlainLoop, "{what}");
    assert!(is_pipeline || step.times.len() == shares.len(), "{what}: {:?}", step.times);
    assert!(step.times.iter().flatten().all(|time| *time <= step.time), "{what}");
    assert_eq!(step.replayed, 0, "{what}: nothing is on a CPU");
}
