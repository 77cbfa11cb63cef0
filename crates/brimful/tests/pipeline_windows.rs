//! A pipeline's step over several mini-batches: gradients, loss, statistics and parameters are those of
//! one mini-batch with all their samples; a mini-batch that fails leaves the earlier ones.

mod support;

use brimful::StepError;
use brimful::batch::BatchError;
use brimful::optim::Adam;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Error, Loss, Pipeline, Size};
use support::pipeline_cases::{CASES, CNN, Case, Cut, GPT, MLP, Piece, Plain, builder, mlp};
use support::{Update, alone, assert_close, copies, test_device};
use tch::{Kind, Tensor};

const INTERLEAVED: Schedule = Schedule::Interleaved { stages_per_device: 2 };
const MICRO_BATCHES: usize = 3;
/// Samples of each mini-batch of a step: ragged, and fewer than micro-batches.
const WINDOW: [i64; 3] = [7, 2, 4];

/// A mini-batch, with the seed that the step draws for it.
struct Drawn {
    x: Tensor,
    y: Tensor,
    seed: u64,
}

/// The mini-batches of a window; what is drawn for each is what a pipeline of one stage tells.
fn window(case: &Case, number: i64, lengths: &[i64]) -> Vec<Drawn> {
    let mut teller = builder((case.layers)(), 1).build().expect("a pipeline");
    let drawn = (10 * number..).zip(lengths).map(|(seed, &samples)| {
        let (x, y) = ((case.input)(samples), (case.target)(samples));
        tch::manual_seed(seed);
        let told = teller.backward(&x, &y, case.loss).expect("a step").seed;
        Drawn { x, y, seed: told.expect("a seed") }
    });
    drawn.collect()
}

/// Accumulates a window as it was drawn.
fn accumulate(pipe: &mut Pipeline, case: &Case, number: i64, window: &[Drawn], what: &str) {
    for (seed, Drawn { x, y, .. }) in (10 * number..).zip(window) {
        tch::manual_seed(seed);
        let loss = case.loss;
        let outputs = pipe.accumulate(x, y, move |out: Tensor, y| {
            let given = out.detach();
            (loss(out, y), given)
        });
        let outputs = outputs.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(outputs.size()[0], x.size()[0], "{what}: the outputs of the mini-batch");
    }
}

/// What the plain model takes at once, and in which pieces that so many replicas run it.
fn whole(case: &Case, window: &[Drawn], replicas: usize) -> (Tensor, Tensor, Vec<Piece>) {
    let join =
        |of: fn(&Drawn) -> &Tensor| Tensor::cat(&window.iter().map(of).collect::<Vec<_>>(), 0);
    let (x, y) = (join(|drawn| &drawn.x), join(|drawn| &drawn.y));
    let samples = x.size()[0] as usize;
    if !case.shows_cut {
        return (x, y, case.pieces(Cut { samples, replicas: 1, micro_batches: 1 }, Some(0)));
    }
    let mut start = 0;
    let mut all = Vec::new();
    for Drawn { x, seed, .. } in window {
        let samples = x.size()[0] as usize;
        let cut = Cut { samples, replicas, micro_batches: MICRO_BATCHES };
        let pieces = case.pieces(cut, Some(*seed)).into_iter();
        all.extend(pieces.map(|Piece { rows, draws }| Piece {
            rows: start + rows.start..start + rows.end,
            draws,
        }));
        start += samples;
    }
    (x, y, all)
}

fn compare(case: &Case, mut pipe: Pipeline, what: &str) {
    let mut plain = Plain::of(&(case.layers)(), &pipe);
    let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
    for number in 0..2 {
        let what = format!("{what}, step {number}");
        let window = window(case, number, &WINDOW);
        accumulate(&mut pipe, case, number, &window, &what);
        assert!(pipe.gradients().expect("gradients").is_empty(), "{what}: not before the commit");
        let step = pipe.commit().unwrap_or_else(|error| panic!("{what}: {error}"));
        let (x, y, pieces) = whole(case, &window, 1);
        let expected = plain.backward_pieces(case, &x, &y, &pieces);
        assert!((step.loss - expected).abs() < 1e-10, "{what}: {} not {expected}", step.loss);
        assert!((step.terms.iter().sum::<f64>() - expected).abs() < 1e-10, "{what}: its terms");
        assert_eq!(step.samples, 13, "{what}");
        assert_eq!(step.sizes, [3, 2, 2, 1, 1, 2, 1, 1], "{what}");
        assert_eq!(step.seed, Some(window[0].seed), "{what}: the first one's");
        assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), &what);
        optimizer.update();
        plain.optimizer.update();
        // With the running statistics, which have moved once.
        assert_close(&pipe.variables().expect("variables"), &plain.values(), &what);
    }
}

#[test]
fn several_mini_batches_are_one_step() {
    let _turn = alone();
    tch::manual_seed(21);
    for case in &CASES {
        for (devices, schedule, recompute) in [
            (1, Schedule::GPipe, Recompute::Never),
            (3, Schedule::OneFOneB, Recompute::Never),
            (2, Schedule::GPipe, Recompute::Always),
            (2, INTERLEAVED, Recompute::ExceptLast),
        ] {
            let what = format!("{}, {devices} devices, {schedule}, {recompute}", case.name);
            let pipe = builder((case.layers)(), devices)
                .schedule(schedule)
                .recompute(recompute)
                .micro_batches(MICRO_BATCHES)
                .build()
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            compare(case, pipe, &what);
        }
    }
}

/// In some mini-batches, be they first or last, only one of the replicas has a sample.
#[test]
fn replicas_of_one_process_accumulate_too() {
    let _turn = alone();
    tch::manual_seed(22);
    for case in &CASES {
        for lengths in [[7, 2, 4], [1, 7, 4], [4, 7, 1], [1, 1, 1]] {
            let what = format!("{}, {lengths:?}", case.name);
            let mut pipe = builder((case.layers)(), 4)
                .replicas(2)
                .micro_batches(MICRO_BATCHES)
                .build()
                .expect("two pipelines");
            let plain = Plain::of(&(case.layers)(), &pipe);
            let window = window(case, 0, &lengths);
            accumulate(&mut pipe, case, 0, &window, &what);
            let step = pipe.commit().unwrap_or_else(|error| panic!("{what}: {error}"));
            let (x, y, pieces) = whole(case, &window, 2);
            let expected = plain.backward_pieces(case, &x, &y, &pieces);
            assert!((step.loss - expected).abs() < 1e-10, "{what}: {} not {expected}", step.loss);
            let shares = |of: fn(usize) -> usize| lengths.map(|n| of(n as usize)).iter().sum();
            let shares: [usize; 2] = [shares(|n| n.div_ceil(2)), shares(|n| n / 2)];
            assert_eq!(step.shares, shares, "{what}");
            assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), &what);
            assert_close(&pipe.variables().expect("variables"), &plain.values(), &what);
        }
    }
}

/// Whatever fails in the middle: the layers, the closure, its loss, or what is given to it.
#[test]
fn a_mini_batch_that_fails_leaves_the_earlier_ones() {
    let _turn = alone();
    for case in [&MLP, &CNN, &GPT] {
        tch::manual_seed(23);
        let build = || builder((case.layers)(), 3).micro_batches(MICRO_BATCHES).build();
        let (mut pipe, mut calm) = (build().expect("a pipeline"), build().expect("a pipeline"));
        calm.set_variables(copies(&pipe.variables().expect("variables"))).expect("the same");
        let window = window(case, 0, &WINDOW);
        accumulate(&mut calm, case, 0, &window, case.name);
        let expected = calm.commit().expect("a step");

        let Drawn { x, y, .. } = &window[0];
        let fail = |pipe: &mut Pipeline| {
            let error = pipe.accumulate(x, y, |_: Tensor, _| Err::<Loss, _>(std::fmt::Error));
            assert!(error.is_err(), "{}", case.name);
            let mut calls = 0;
            let error = pipe.accumulate(x, y, move |out: Tensor, _: &Tensor| -> Loss {
                calls += 1;
                assert!(calls < MICRO_BATCHES, "no loss");
                Loss::mean(out.sum(Kind::Double))
            });
            assert!(error.is_err(), "{}", case.name);
            let error = pipe.accumulate(&x.narrow(1, 0, 1), y, case.loss);
            assert!(error.is_err(), "{}", case.name);
            let error = pipe.accumulate(x, &y.narrow(0, 0, 1), case.loss);
            assert!(
                matches!(error, Err(Error::Batch(BatchError::LeafLengthsDiffer { .. }))),
                "{error:?}"
            );
        };
        fail(&mut pipe);
        accumulate(&mut pipe, case, 0, &window[..1], case.name);
        fail(&mut pipe);
        for (seed, Drawn { x, y, .. }) in (0..).zip(&window).skip(1) {
            tch::manual_seed(seed);
            pipe.accumulate(x, y, case.loss).expect("a mini-batch");
            fail(&mut pipe);
        }
        let found = pipe.commit().expect("a step");
        assert_eq!((found.loss, found.sizes), (expected.loss, expected.sizes), "{}", case.name);
        let gradients = pipe.gradients().expect("gradients");
        assert_close(&gradients, &calm.gradients().expect("gradients"), case.name);
        let values = pipe.variables().expect("variables");
        assert_close(&values, &calm.variables().expect("variables"), case.name);
    }
}

#[test]
fn what_has_no_place_in_a_window_is_refused() {
    let _turn = alone();
    tch::manual_seed(24);
    let mut pipe = builder(mlp(), 3).micro_batches(2).build().expect("a pipeline");
    let plain = Plain::of(&mlp(), &pipe);
    assert_eq!(pipe.commit().expect_err("nothing"), Error::Step(StepError::NothingAccumulated));
    let (x, y) = ((MLP.input)(6), (MLP.target)(6));
    pipe.accumulate(&x, &y, MLP.loss).expect("a mini-batch");

    // A whole step, in any of its forms.
    let open = Error::Step(StepError::WindowOpen { samples: 6 });
    assert_eq!(pipe.backward(&x, &y, MLP.loss).expect_err("a window is open"), open);
    let error = pipe.backward_whole(&x, |out| out.sum(Kind::Double)).expect_err("open");
    assert_eq!(error, open);
    assert_eq!(pipe.forward(&x).expect_err("a window is open"), open);

    // Other parameters than those that the sums are of.
    pipe.freeze(|name| name.starts_with("fc2")).expect("frozen");
    pipe.accumulate(&x, &y, MLP.loss).expect_err("others are trained now");
    pipe.commit().expect_err("others are trained now");
    assert!(pipe.gradients().expect("gradients").is_empty());
    pipe.unfreeze(|_| true).expect("trained again");

    // An evaluation is no part of it.
    let evaluated = pipe.evaluate(&x, &y, MLP.loss).expect("an evaluation").loss;
    let step = pipe.commit().expect("what was accumulated");
    let expected = plain.backward(&MLP, &x, &y, Size::Count(1), None);
    assert!((step.loss - expected).abs() < 1e-10 && (evaluated - expected).abs() < 1e-10);
    assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), "after all");
    assert_eq!(
        pipe.commit().expect_err("nothing any more"),
        Error::Step(StepError::NothingAccumulated)
    );
    assert_eq!(pipe.output_device(), test_device());
}
