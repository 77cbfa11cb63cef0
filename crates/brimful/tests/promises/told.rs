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
    for size in [MicroBatches::Auto, MicroBatches::Largest] {
        automatic(&mut *engine(make, NORMED, size, world), world, size);
    }
}

/// Checks the reported decisions of an automatic size, and its failures.
fn automatic(engine: &mut dyn Engine, world: &World, size: MicroBatches) {
    let batch = samples(SAMPLES as i64, 10);
    for fails in [false, true, false] {
        let what = format!("{}, {size:?}, with a failure: {fails}", engine.about().name);
        reset(engine, NORMED);
        if fails && world.rank() == 0 {
            engine.about().arenas[0].fail_nth_allocation(4);
        }
        let step = engine.backward(&batch, &SEVERAL.loss()).expect(&what);
        consistent(engine, &step, world, &what);
        assert_eq!(step.retries, usize::from(fails), "{what}: {step:?}");
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
