//! Transparent: a step gives the loss, terms, gradients and running statistics of the plain model on the whole
//! mini-batch, whatever its length and micro-batch size.

use std::slice;

use brimful::{Error, MicroBatches, StepError, World};
use tch::Tensor;
use tch::nn::ModuleT;

use crate::kinds::{About, Drawing, Engine, Make};
use crate::plain::{
    CASES, Case, DROPPED, NORMED, Net, OF_ALL, PLAIN, Plain, SEVERAL, engine, joined, own_sizes,
    reset, samples, seed_of, state,
};
use crate::support::pipeline_cases::drawn_seed;
use crate::support::{Named, TOLERANCE, assert_all_close, assert_close, assert_same};

/// Even, ragged, and all in one.
const SIZES: [MicroBatches; 4] = [
    MicroBatches::Samples(2),
    MicroBatches::Samples(5),
    MicroBatches::Count(3),
    MicroBatches::Samples(100),
];
/// Fewer samples than parts, odd ones, and more.
const SAMPLES: [i64; 3] = [1, 7, 13];

pub fn holds(make: Make, world: &World) {
    holds_for(make, world, &SIZES, &CASES);
}

/// Checks a pipeline with another schedule, which decides neither on sizes nor on losses.
pub fn holds_in_its_order(make: Make, world: &World) {
    holds_for(make, world, &SIZES[1..3], slice::from_ref(&SEVERAL));
}

fn holds_for(make: Make, world: &World, sizes: &[MicroBatches], cases: &[Case]) {
    // Where the cut shows, one loss of all kinds of terms shows what the others would.
    for (net, cases) in [(PLAIN, cases), (DROPPED, slice::from_ref(&SEVERAL))] {
        let plain = Plain::new(net);
        for size in sizes {
            let mut engine = engine(make, net, *size, world);
            for count in SAMPLES {
                for case in cases {
                    step(&mut *engine, &plain, net, count, case);
                }
                whole(&mut *engine, &plain, net, count);
                evaluation(&mut *engine, &plain, net, count);
            }
        }
    }
    for net in [PLAIN, NORMED] {
        let mut engine = engine(make, net, MicroBatches::Samples(3), world);
        window(&mut *engine, &Plain::new(net), net, cases);
    }
}

fn start(engine: &mut dyn Engine, plain: &Plain, net: Net) {
    plain.reset();
    reset(engine, net);
}

fn called(engine: &dyn Engine, net: Net, count: i64, call: &str) -> String {
    let About { name, size, .. } = engine.about();
    format!("{name}, {}, {call}, {count} in {size:?}", net.name)
}

fn step(engine: &mut dyn Engine, plain: &Plain, net: Net, count: i64, case: &Case) {
    let what = called(engine, net, count, case.name);
    start(engine, plain, net);
    let batch = samples(count, 10);
    let step = engine.backward(&batch, &case.loss()).unwrap_or_else(|e| panic!("{what}: {e}"));
    let terms = plain.backward(engine, &[&batch], step.seed, case.full);
    assert_terms(&step.terms, step.loss, &terms, &what);
    assert_alike(engine, plain, &what);
}

fn whole(engine: &mut dyn Engine, plain: &Plain, net: Net, count: i64) {
    let what = called(engine, net, count, "a loss of all");
    start(engine, plain, net);
    let batch = samples(count, 20);
    let step = engine.backward_whole(&batch, OF_ALL);
    if !engine.about().has_whole {
        assert!(matches!(step.err(), Some(Error::Step(StepError::NotOverRanks { .. }))), "{what}");
        return;
    }
    let step = step.unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(step.terms, [step.loss], "{what}");
    let terms = plain.backward(engine, &[&batch], step.seed, |out, _| {
        assert_all_close(&step.outputs, out, &what);
        vec![OF_ALL(out)]
    });
    assert_terms(&step.terms, step.loss, &terms, &what);
    assert_alike(engine, plain, &what);
}

fn evaluation(engine: &mut dyn Engine, plain: &Plain, net: Net, count: i64) {
    let what = called(engine, net, count, "evaluated");
    start(engine, plain, net);
    let batch = samples(count, 30);
    let before = state(engine);
    let step = engine.evaluate(&batch, &SEVERAL.loss()).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_same(&what, &before, &state(engine));
    assert_eq!(step.sizes, own_sizes(engine, count as usize), "{what}");
    let out = tch::no_grad(|| plain.model.forward_t(&batch.0, false));
    let terms = (SEVERAL.full)(&out, &batch.1);
    let terms: Vec<f64> = terms.iter().map(|term| term.double_value(&[])).collect();
    assert_terms(&step.terms, step.loss, &terms, &what);
    let own: Vec<Tensor> = engine.about().dealt(count as usize)[engine.about().own.clone()]
        .iter()
        .map(|part| out.narrow(0, part.start as i64, part.len() as i64))
        .collect();
    let own = Tensor::cat(&own, 0);
    if own.size()[0] > 0 {
        assert_all_close(&step.outputs, &own, &what);
    }
}

/// Checks that several mini-batches of different lengths form one step.
fn window(engine: &mut dyn Engine, plain: &Plain, net: Net, cases: &[Case]) {
    // One of several parts alone has a sample of the second.
    let batches = [samples(7, 40), samples(1, 50), samples(5, 60)];
    let batches: Vec<_> = batches.iter().collect();
    for case in cases {
        let what = format!("{}, {}, a window of {}", engine.about().name, net.name, case.name);
        start(engine, plain, net);
        for batch in &batches {
            engine.accumulate(batch, &case.loss()).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        assert!(engine.gradients().is_empty(), "{what}: before the commit");
        let step = engine.commit().unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(step.samples as i64, joined(&batches).0.size()[0], "{what}");
        let sizes = batches.iter().flat_map(|batch| own_sizes(engine, batch.0.size()[0] as usize));
        assert_eq!(step.sizes, sizes.collect::<Vec<_>>(), "{what}");
        assert_eq!(step.seed, first_seed(engine), "{what}: the first one's");
        let terms = plain.backward(engine, &batches, None, case.full);
        assert_terms(&step.terms, step.loss, &terms, &what);
        assert_alike(engine, plain, &what);
    }
}

/// Returns the seed that a window's first mini-batch draws after [`reset`].
fn first_seed(engine: &dyn Engine) -> Option<u64> {
    let about = engine.about();
    match about.drawing {
        Drawing::AsPlainLoop => None,
        // Until the commit such a rank is alone.
        Drawing::ByPart if about.arenas.len() == 1 => None,
        drawing => {
            seed_of(if drawing == Drawing::ByPart { about.rank } else { 0 });
            Some(drawn_seed())
        }
    }
}

fn assert_terms(terms: &[f64], loss: f64, expected: &[f64], what: &str) {
    let sum = |terms: &[f64]| Tensor::from(terms.iter().sum::<f64>());
    let (found, wanted) = (Tensor::from_slice(terms), Tensor::from_slice(expected));
    assert_all_close(&found, &wanted, &format!("{what}: terms"));
    assert_all_close(&sum(terms), &sum(expected), &format!("{what}: the loss"));
    assert!((terms.iter().sum::<f64>() - loss).abs() <= TOLERANCE * loss.abs().max(1.0), "{what}");
}

/// Compares gradients and all values, of which steps change only the statistics.
fn assert_alike(engine: &dyn Engine, plain: &Plain, what: &str) {
    let values = engine.variables();
    assert_close(&engine.gradients(), &those_of(plain.gradients(), &values), what);
    assert_close(&values, &those_of(plain.values(), &values), what);
}

/// Returns the tensors that a rank sees; the first rank of a pipeline sees all.
fn those_of(all: Named, seen: &Named) -> Named {
    all.into_iter().filter(|(name, _)| seen.iter().any(|(other, _)| other == name)).collect()
}
