//! Automatic sizes of pipelines: the stage with the least memory decides, and a failed step is retried.

use crate::support::pipeline_cases::of_all;
use crate::support::{Named, assert_within, numbers};
use brimful::auto::Why;
use brimful::memory::Arena;
use brimful::pipeline::Outputs;
use brimful::schedule::{Recompute, Schedule};
use brimful::{DeviceSpec, Error, Layers, Loss, MicroBatches, Pipeline, StepReport};
use tch::{Kind, Tensor, nn};

const SAMPLES: i64 = 96;

fn layers() -> Layers {
    let linear = |from, to| move |p: &nn::Path| nn::linear(p, from, to, Default::default());
    Layers::new()
        .add("one", linear(16, 64))
        .add_fn("tanh", |x| x.tanh())
        .add("two", linear(64, 64))
        .add_fn("tanh_too", |x| x.tanh())
        .add("three", linear(64, 4))
}

fn pipeline(size: MicroBatches, arenas: &[Arena; 2]) -> Pipeline {
    tch::manual_seed(7);
    Pipeline::builder(layers())
        .devices(arenas.clone().map(DeviceSpec::from))
        .balance([2, 3])
        .micro_batches(size)
        .schedule(Schedule::OneFOneB)
        .recompute(Recompute::Never)
        .kind(Kind::Double)
        .build()
        .expect("a pipeline")
}

fn batch() -> (Tensor, Tensor) {
    (numbers(&[SAMPLES, 16], 100), numbers(&[SAMPLES, 4], 200))
}

fn step(pipe: &mut Pipeline) -> brimful::Result<StepReport> {
    let (x, y) = batch();
    pipe.backward(&x, &y, |out: Tensor, y: &Tensor| {
        Loss::mean((out - y).square().mean(Kind::Double))
    })
}

fn assert_gradients(what: &str, expected: &Named, pipe: &Pipeline) {
    assert_within(&pipe.gradients().expect("gradients"), expected, 1e-12, what);
}

fn free() -> [Arena; 2] {
    [Arena::new("first"), Arena::new("second")]
}

#[test]
fn the_tightest_stage_decides() {
    let arenas = free();
    let expected = {
        let mut pipe = pipeline(MicroBatches::Count(4), &free());
        let loss = step(&mut pipe).expect("a step").loss;
        (loss, pipe.gradients().expect("gradients"))
    };
    let mut pipe = pipeline(MicroBatches::Largest, &arenas);
    for turn in 0..4 {
        let step = step(&mut pipe).expect("a step");
        assert!((step.loss - expected.0).abs() < 1e-12);
        if turn == 0 {
            assert_gradients("the first step", &expected.1, &pipe);
        }
        pipe.zero_grad().expect("cleared");
    }
    let whole = step(&mut pipe).expect("a step");
    assert_eq!((whole.sizes.as_slice(), whole.retries), ([SAMPLES as usize].as_slice(), 0));
    pipe.zero_grad().expect("cleared");

    let needed = whole.decisions[0].measured.expect("measured").0;
    arenas[1].set_limit(Some(arenas[1].current() + needed / 2)).expect("a limit");
    let less = step(&mut pipe).expect("a step");
    assert!(less.sizes[0] < SAMPLES as usize, "{:?}", less.sizes);
    // The number of attempts is not guaranteed: a stage's memory depends on whether its next micro-batch's input
    // has arrived yet.
    assert_eq!(less.decisions[0].why, Why::LessMemory);
    assert!(less.decisions.last().is_some_and(|last| !last.failed), "{:?}", less.decisions);
    assert_gradients("a tight stage", &expected.1, &pipe);
}

/// Returns a step's loss, retries, and number of sizes.
fn reported<O>(step: StepReport<O>) -> (f64, usize, usize) {
    (step.loss, step.retries, step.decisions.len())
}

/// Fails every allocation of either stage, one at a time, and all at once.
fn run_out_in_any_stage(run: impl Fn(&mut Pipeline) -> brimful::Result<(f64, usize, usize)>) {
    let mut calm = pipeline(MicroBatches::Count(1), &free());
    let (loss, ..) = run(&mut calm).expect("a step");
    let expected = calm.gradients().expect("gradients");
    for stage in [0, 1] {
        let arenas = free();
        let mut pipe = pipeline(MicroBatches::Largest, &arenas);
        for _ in 0..4 {
            run(&mut pipe).expect("a step");
        }
        let mut retried = 0;
        for n in 1.. {
            let what = format!("stage {stage}, allocation {n}");
            pipe.zero_grad().expect("cleared");
            arenas[stage].fail_nth_allocation(n);
            let (found, retries, sizes) = run(&mut pipe).expect("it fails once");
            let failed = arenas[stage].refusals() > retried as u64;
            arenas[stage].fail_nth_allocation(0);
            assert_eq!((retries, sizes), (usize::from(failed), 1 + retries), "{what}");
            assert!((found - loss).abs() < 1e-12, "{what}");
            assert_gradients(&what, &expected, &pipe);
            if !failed {
                break;
            }
            retried += 1;
        }
        assert!(retried > 10, "forward and backward have more allocations than {retried}");
        pipe.zero_grad().expect("cleared");
        arenas[stage].fail_from_nth_allocation(1);
        let error = run(&mut pipe).expect_err("all fail");
        arenas[stage].fail_nth_allocation(0);
        assert!(matches!(error, Error::DoesNotFit { .. }), "{error}");
        run(&mut pipe).expect("the next step");
        assert_gradients("the next step", &expected, &pipe);
    }
}

#[test]
fn a_step_that_runs_out_in_any_stage_is_run_again() {
    run_out_in_any_stage(|pipe| step(pipe).map(reported));
}

/// Forward, loss on all outputs, and backward form one step, wherever memory runs out.
#[test]
fn a_loss_on_all_outputs_is_tried_again_too() {
    let (x, _) = batch();
    let mean = |out: &Outputs| of_all(out) / SAMPLES as f64;
    run_out_in_any_stage(|pipe| pipe.backward_whole(&x, mean).map(reported));
}
