//! Behaviour that all kinds of engines share: automatic sizes, their warnings, reserved and remembered memory.

use std::sync::Arc;

use brimful::auto::Why;
use brimful::memory::Arena;
use brimful::nn::BatchNormPolicy;
use brimful::optim::Adam;
use brimful::{Error, Layers, Loss, MicroBatches, StepReport, World};
use tch::nn;
use tch::{Device, Kind, Tensor};

use crate::kinds::{Drawing, Engine, LossFn, Make, Setup};
use crate::plain::{MEAN, NORMED, engine, engine_of, samples, state};
use crate::support::{assert_same, logged};

/// Layers with about 100 KB of parameters, and twice that for Adam's state.
fn heavy(_: BatchNormPolicy) -> Layers {
    Layers::new()
        .add("in", |p| nn::linear(p, 4, 80, Default::default()))
        .add_fn("tanh", |x| x.tanh())
        .add("mid", |p| nn::linear(p, 80, 80, Default::default()))
        .add("mid too", |p| nn::linear(p, 80, 80, Default::default()))
        .add_fn("tanh too", |x| x.tanh())
        .add("out", |p| nn::linear(p, 80, 3, Default::default()))
}

/// Adam's state of the heavier part of these layers: two numbers of eight bytes per parameter.
const STATE: u64 = 80 * 80 * 16;
/// Enough for the gradients, Adam's state and some samples, but not for all.
const LIMIT: u64 = 700 << 10;
const MANY: i64 = 1000;

fn heavy_engine(make: Make, world: &World, limit: u64, reserve: bool) -> Box<dyn Engine> {
    let setup = Setup::new(heavy, MicroBatches::Largest, world);
    let reserve = reserve.then(|| Adam::new(0.1).into());
    make(&Setup { limit: Some(limit), reserve, ..setup })
}

/// Returns the final size of a step.
fn size(step: &StepReport) -> usize {
    step.decisions.last().expect("a size").size
}

pub fn memory_is_kept_for_an_optimizer(make: Make, world: &World) {
    let first = |reserve: bool| {
        let mut engine = heavy_engine(make, world, LIMIT, reserve);
        let step = engine.backward(&samples(MANY, 10), &MEAN.loss()).expect("it fits in parts");
        let available = step.decisions.last().expect("a size").available.0;
        (engine, size(&step), available)
    };
    let ((engine, smaller, with), (_, larger, without)) = (first(true), first(false));
    let about = engine.about();
    let (name, state) = (about.name, if about.is_offloaded { 0 } else { STATE });
    assert!(with + state <= without, "{name}: {with} bytes to plan with, {without} without Adam");
    // One device finds its size in one step; others may still be searching.
    if about.drawing == Drawing::AsPlainLoop {
        assert!(smaller < larger, "{name}: {smaller} and {larger} samples");
    }
}

/// A failed step does not create the optimizer's state either.
pub fn memory_stays_reserved_after_a_failure(make: Make, world: &World) {
    let batch = samples(MANY, 10);
    let gives_up: LossFn = Arc::new(|_, _| Err("no more".to_owned()));
    let mut engine = heavy_engine(make, world, LIMIT, true);
    let (name, on_host) = (engine.about().name, engine.about().is_offloaded);
    let failed = engine.backward(&batch, &gives_up).expect_err("the closure's").to_string();
    assert!(failed.contains("no more"), "{name}: {failed}");
    if engine.about().has_whole {
        // Not a scalar.
        let failed = engine.backward_whole(&batch, |out| out.shallow_clone()).map(drop);
        failed.expect_err("no loss");
    }
    let mut available = || {
        let step = engine.backward(&batch, &MEAN.loss()).expect("a step");
        engine.zero_grad();
        step.decisions.last().expect("a size").available.0
    };
    let (reserved, free) = (available(), available());
    let state = if on_host { 0 } else { STATE };
    assert!(reserved + state <= free, "{name}: {reserved} bytes were free, then {free}");
}

pub fn sizes_are_remembered(make: Make, world: &World) {
    let folder = tempfile::tempdir().expect("a folder");
    let start = |limit| {
        let setup = Setup::new(heavy, MicroBatches::Largest, world);
        let remember = Some(folder.path().join("sizes.json"));
        make(&Setup { limit: Some(limit), remember, ..setup })
    };
    let batch = samples(MANY, 10);
    let mut engine = start(LIMIT);
    let name = engine.about().name;
    let run = |engine: &mut dyn Engine| engine.backward(&batch, &MEAN.loss()).expect("a step");
    // Until the search ends: a pipeline tries larger sizes for some steps.
    let found = (0..10).map(|_| size(&run(&mut *engine))).last();
    drop(engine);
    let step = run(&mut *start(LIMIT));
    let why: Vec<Why> = step.decisions.iter().map(|decision| decision.why).collect();
    assert!(why.iter().all(|why| matches!(why, Why::Remembered | Why::Others)), "{name}: {why:?}");
    assert_eq!((Some(size(&step)), step.retries), (found, 0), "{name}");
    let step = run(&mut *start(2 * LIMIT));
    let why: Vec<Why> = step.decisions.iter().map(|decision| decision.why).collect();
    assert!(!why.contains(&Why::Remembered), "{name}, in another memory: {why:?}");
}

/// The memory of gradients does not count per sample. If not even the gradients fit, nothing changes.
pub fn what_cannot_fit_is_refused(make: Make, world: &World) {
    let mut engine = heavy_engine(make, world, LIMIT, false);
    let name = engine.about().name;
    for number in 0..4 {
        let step = engine.backward(&samples(MANY, 10), &MEAN.loss()).expect("it fits in parts");
        assert!(step.retries <= 1, "{name}, step {number}: {:?}", step.decisions);
        engine.zero_grad();
    }
    let mut engine = heavy_engine(make, world, 1000, false);
    let before = state(&*engine);
    let error = engine.backward(&samples(20, 10), &MEAN.loss()).expect_err("too little memory");
    assert!(matches!(error, Error::DoesNotFit { .. }), "{name}: {error}");
    assert_same(name, &before, &state(&*engine));
}

pub fn few_samples_for_batch_norm_are_warned_of(make: Make, world: &World) {
    // Every sample holds a megabyte while its loss is computed.
    let hungry: LossFn = Arc::new(|out, target| {
        let _held = Tensor::empty([out.size()[0] << 20], (Kind::Uint8, Device::Cpu));
        Ok((MEAN.micro)(out, target))
    });
    // A small mini-batch first runs in small parts, however much fits.
    for (count, limit, expected) in [(64, 5 << 20, 1), (64, 200 << 20, 0), (4, 200 << 20, 0)] {
        let setup = Setup::new(NORMED.layers, MicroBatches::Largest, world);
        let mut engine = engine_of(make, &Setup { limit: Some(limit), ..setup }, NORMED);
        let log = logged(|| {
            for _ in 0..3 {
                let step = engine.backward(&samples(count, 10), &hungry).expect("a step");
                let one_device = engine.about().drawing == Drawing::AsPlainLoop;
                assert!(step.retries == 0 || !one_device, "{limit} bytes: {}", step.retries);
            }
        });
        let warned = log.matches("no more than a few samples fit").count();
        let expected = if engine.about().is_exact { 0 } else { expected };
        assert_eq!(warned, expected, "{}, {limit} bytes: {log}", engine.about().name);
    }
}

pub fn hidden_out_of_memory_is_warned_of(make: Make, world: &World) {
    let setup = Setup::new(NORMED.layers, MicroBatches::Auto, world);
    let mut engine = engine_of(make, &Setup { limit: Some(8 << 20), ..setup }, NORMED);
    let hiding: LossFn = Arc::new(|out, target| {
        assert!(Tensor::f_zeros([100 << 20], (Kind::Float, Device::Cpu)).is_err(), "too large");
        Ok((MEAN.micro)(out, target))
    });
    let log = logged(|| {
        for _ in 0..2 {
            engine.backward(&samples(20, 10), &hiding).expect("it goes on");
        }
    });
    // In a pipeline over ranks, only the rank with the last stage sees it.
    let sees = engine.about().arenas.iter().any(|arena| Arena::refusals(arena) > 0);
    let warned = log.matches("was caught inside the closure").count();
    assert_eq!(warned, usize::from(sees), "{}: {log}", engine.about().name);
    assert!(sees || world.size() > 1, "{}", engine.about().name);
}

/// The term of the first rank's first micro-batch counts, also in windows in which ranks have different numbers
/// of mini-batches.
pub fn what_counts_once_counts_once(make: Make, world: &World) {
    let once: LossFn = Arc::new(|out, _| {
        let one = out.sum(Kind::Double) * 0.0 + 1.0;
        Ok(Loss::once(one) + Loss::mean(out.mean(Kind::Double)))
    });
    let mut engine = engine(make, NORMED, MicroBatches::Samples(2), world);
    let step = engine.backward(&samples(9, 10), &once).expect("a step");
    assert_eq!(step.terms[0], 1.0, "{}", engine.about().name);
    let own_matter = if engine.about().accumulates_apart { world.rank() } else { 0 };
    for _ in 0..2 + own_matter {
        engine.accumulate(&samples(9, 10), &once).expect("a part");
    }
    let step = engine.commit().expect("a step");
    assert_eq!(step.terms[0], 1.0, "{}", engine.about().name);
}
