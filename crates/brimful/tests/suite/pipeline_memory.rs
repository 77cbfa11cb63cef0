//! Memory of the stages: as the schedules' formulas predict, and within their arenas.
//!
//! A stage is `LAYERS` pairs of a linear layer and a tanh. Each keeps one tensor of a micro-batch for its
//! backward, the tanh's output; the last one is also the boundary that the next stage keeps.

use crate::support::transformer;
use brimful::internal::sums_apart;
use brimful::memory::Arena;
use brimful::optim::Adam;
use brimful::plan::{PlanDevice, Request, plan};
use brimful::schedule::{Recompute, Schedule};
use brimful::{DeviceSpec, Error, Layers, Loss, MicroBatches, Pipeline, balance};
use tch::nn;
use tch::{Device, Kind, Tensor};

const STAGES: usize = 4;
const LAYERS: usize = 8;
const WIDTH: i64 = 32;
/// Samples in a micro-batch: enough for the parameters to be small beside the activations.
const SAMPLES: i64 = 1024;
/// Bytes of one micro-batch between two layers.
const BOUNDARY: u64 = (WIDTH * SAMPLES * 4) as u64;

fn layers(stages: usize) -> Layers {
    (0..stages * LAYERS).fold(Layers::new(), |layers, number| {
        layers
            .add(format!("fc{number}"), |p| nn::linear(p, WIDTH, WIDTH, Default::default()))
            .add_fn(format!("tanh{number}"), |x| x.tanh())
    })
}

fn pipeline(arenas: &[Arena], schedule: Schedule, recompute: Recompute) -> Pipeline {
    let device = |arena: &Arena| DeviceSpec::cpu().threads(1).arena(arena.clone());
    Pipeline::builder(layers(STAGES))
        .devices(arenas.iter().map(device))
        .schedule(schedule)
        .recompute(recompute)
        .micro_batches(MicroBatches::Samples(SAMPLES as usize))
        .build()
        .expect("a pipeline")
}

fn step(pipe: &mut Pipeline, m: i64) -> Result<Vec<u64>, Error> {
    let x = Tensor::ones([m * SAMPLES, WIDTH], (Kind::Float, Device::Cpu));
    let loss = |out: Tensor, _: &Tensor| Loss::mean(out.mean(Kind::Float));
    let step = pipe.backward(&x, &x, loss)?;
    Ok(step.peaks.into_iter().map(|peak| peak.expect("an arena").0).collect())
}

/// Returns each stage's peak in a step of `m` micro-batches.
fn peaks(schedule: Schedule, recompute: Recompute, m: i64) -> Vec<u64> {
    let arenas: Vec<_> = (0..STAGES).map(|j| Arena::new(&format!("stage {j}"))).collect();
    let mut pipe = pipeline(&arenas, schedule, recompute);
    step(&mut pipe, m).expect("a step")
}

/// Checks within 5 %. A gradient that the previous stage has not used yet is charged to the stage that made it:
/// one may be in the channel, and one in use.
fn assert_near(found: u64, expected: u64, under_way: u64, what: &str) {
    let (least, most) = (0.95 * expected as f64, 1.05 * (expected + under_way * BOUNDARY) as f64);
    assert!((least..=most).contains(&(found as f64)), "{what}: {found} bytes, not {expected}");
}

#[test]
fn gpipe_holds_every_micro_batch() {
    let (few, many) = (4, 12);
    let (less, more) = (
        peaks(Schedule::GPipe, Recompute::Never, few),
        peaks(Schedule::GPipe, Recompute::Never, many),
    );
    for j in 0..STAGES {
        let grown = more[j] - less[j];
        let expected = (many - few) as u64 * LAYERS as u64 * BOUNDARY;
        assert_near(grown, expected, 0, &format!("stage {j}"));
    }
}

#[test]
fn one_f_one_b_holds_as_many_as_there_are_stages_from_here_on() {
    let found = peaks(Schedule::OneFOneB, Recompute::Never, 12);
    for (j, found) in found.into_iter().enumerate() {
        let held = (STAGES - j) as i64;
        let expected = peaks(Schedule::GPipe, Recompute::Never, held)[j];
        assert_near(found, expected, if j > 0 { 2 } else { 0 }, &format!("stage {j}"));
    }
}

#[test]
fn recompute_holds_boundaries_and_one_micro_batch() {
    let m = 12;
    let one = peaks(Schedule::GPipe, Recompute::Never, 1);
    for recompute in [Recompute::ExceptLast, Recompute::Always] {
        let found = peaks(Schedule::GPipe, recompute, m);
        for j in 0..STAGES {
            // The last stage's output is its loss.
            let boundaries = if j + 1 < STAGES { (m - 1) as u64 * BOUNDARY } else { 0 };
            let under_way = if j > 0 { 2 } else { 0 };
            let what = format!("{recompute}, stage {j}");
            assert_near(found[j], one[j] + boundaries, under_way, &what);
        }
    }
}

fn hidden(p: &nn::Path) -> nn::Func<'static> {
    let linear = nn::linear(p, WIDTH, WIDTH, Default::default());
    nn::func(move |x| x.apply(&linear).tanh())
}

fn block(p: &nn::Path) -> nn::Func<'static> {
    transformer::block(p, WIDTH, 8)
}

/// Name of a model, its constructor, and a micro-batch of it.
type DeepModel = (&'static str, fn() -> Layers, Tensor);

/// Perceptron and GPT whose boundaries are small beside the stages' activations. On CPUs a boundary is shared and
/// charged to the stage that makes it, while separate devices would each have a copy.
fn deep_models() -> [DeepModel; 2] {
    fn repeated(count: usize, layer: fn(&nn::Path) -> nn::Func<'static>) -> Layers {
        (0..count).fold(Layers::new(), |layers, number| layers.add(number.to_string(), layer))
    }
    let sample = Tensor::ones([SAMPLES, WIDTH], (Kind::Float, Device::Cpu));
    [
        ("mlp", || repeated(STAGES * 32, hidden), sample.shallow_clone()),
        ("gpt", || repeated(STAGES * 4, block), sample.view([32, -1, WIDTH])),
    ]
}

/// Compares with the plan from the layers' measured memory: with whole, split, and mixed backwards.
#[test]
fn each_stage_needs_what_was_simulated() {
    const M: usize = 8;
    for (name, layers, sample) in deep_models() {
        let profile = balance::measure(&layers(), Device::Cpu, &sample).expect("a profile");
        let x = Tensor::cat(&[&sample; M], 0);
        let devices = vec![PlanDevice::default(); STAGES];
        let mut request = Request::new(&profile, devices, x.size()[0] as usize);
        request.micro_batches = vec![M];
        request.recompute = Some(Recompute::Never);
        request.sums_apart = sums_apart(Device::Cpu, Kind::Float);
        for schedule in [Schedule::OneFOneB, Schedule::ZeroBubbleH1, Schedule::Auto] {
            request.schedules = vec![schedule];
            let plan = plan(&request).expect("a plan");
            let row = plan.best().expect("no limit");
            let arenas = (0..STAGES).map(|j| Arena::new(&format!("stage {j}")));
            let devices = arenas.map(|arena| DeviceSpec::cpu().threads(1).arena(arena));
            let pipe = Pipeline::builder(layers()).devices(devices).plan(row).build();
            let loss = |out: Tensor, _: &Tensor| Loss::mean(out.mean(Kind::Float));
            let step = pipe.expect("a pipeline").backward(&x, &x, loss).expect("a step");
            for (j, (found, planned)) in step.peaks.iter().zip(&row.peak_bytes).enumerate() {
                let found = found.expect("an arena").0;
                let under_way = if j > 0 { 2 } else { 0 };
                assert_near(found, *planned, under_way, &format!("{name}, {schedule}, stage {j}"));
            }
        }
    }
}

#[test]
fn a_model_too_large_for_one_arena_trains_over_four_of_that_size() {
    let train = |pipe: &mut Pipeline| -> Result<(), Error> {
        let mut optimizer = pipe.optimizer(Adam::new(0.01))?;
        for _ in 0..2 {
            step(pipe, 8)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        Ok(())
    };
    let limit = 3 << 20;
    let arena = |name: &str| Arena::limited(name, limit).expect("a limit");
    let build = |stages, arenas: &[Arena]| {
        Pipeline::builder(layers(stages))
            .devices(arenas.iter().cloned())
            .micro_batches(MicroBatches::Samples(SAMPLES as usize))
            .recompute(Recompute::ExceptLast)
            .build()
    };
    let alone = build(STAGES, &[arena("alone")]).and_then(|mut pipe| train(&mut pipe));
    let error = alone.expect_err("too little memory");
    assert!(error.out_of_memory().is_some(), "{error}");

    let arenas: Vec<_> = (0..STAGES).map(|j| arena(&format!("stage {j}"))).collect();
    let mut pipe = build(STAGES, &arenas).expect("a pipeline");
    train(&mut pipe).expect("room for all");

    let mut pipe = build(1, &[arena("small")]).expect("a pipeline");
    train(&mut pipe).expect("a quarter of the model fits one");
}
