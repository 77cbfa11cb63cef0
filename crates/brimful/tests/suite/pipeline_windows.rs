//! A pipeline's step over several mini-batches: gradients, loss, statistics and parameters are those of one
//! mini-batch with all their samples; a failed mini-batch leaves the earlier ones.

use crate::support::pipeline_cases::{
    CASES, CNN, Case, Cut, GPT, INTERLEAVED, MLP, Piece, Plain, builder, built, drawn_seed, mlp,
};
use crate::support::{Update, assert_close, test_device};
use brimful::StepError;
use brimful::batch::BatchError;
use brimful::optim::Adam;
use brimful::pipeline::Offload;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Error, Loss, MicroBatches, Pipeline};
use tch::{Kind, Tensor};

const MICRO_BATCHES: usize = 3;
/// Samples of each mini-batch of a step: ragged, and fewer than micro-batches.
const WINDOW: [usize; 3] = [7, 2, 4];

/// Accumulates mini-batches with these numbers of samples, numbered from `first`.
fn accumulate(pipe: &mut Pipeline, case: &Case, first: i64, lengths: &[usize], what: &str) {
    for (number, samples) in (first..).zip(lengths) {
        let (x, y) = case.data(*samples, number);
        let outputs = pipe.accumulate(&x, &y, case.loss_and_outputs());
        let outputs = outputs.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(outputs.size()[0], x.size()[0], "{what}: the outputs of the mini-batch");
    }
}

/// Runs the plain model on a whole window at once; returns the loss, and the seed of the first mini-batch.
fn whole(
    plain: &Plain,
    case: &Case,
    first: i64,
    lengths: &[usize],
    replicas: usize,
) -> (f64, Option<u64>) {
    let (mut inputs, mut targets, mut pieces, mut seeds) = (vec![], vec![], vec![], vec![]);
    let mut start = 0;
    for (number, &samples) in (first..).zip(lengths) {
        let (x, y) = case.data(samples, number);
        let seed = drawn_seed();
        let cut = Cut { samples, replicas, micro_batches: MICRO_BATCHES };
        let own = case.pieces(cut, Some(seed)).into_iter();
        pieces.extend(
            own.map(|Piece { rows, rng }| Piece {
                rows: start + rows.start..start + rows.end,
                rng,
            }),
        );
        start += samples;
        inputs.push(x);
        targets.push(y);
        seeds.push(seed);
    }
    let (x, y) = (Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0));
    (plain.backward_pieces(case, &x, &y, &pieces), seeds.first().copied())
}

/// Compares two steps over windows of these lengths.
fn compare(case: &Case, mut pipe: Pipeline, replicas: usize, lengths: &[usize], what: &str) {
    let mut plain = Plain::of(&(case.layers)(), &pipe);
    let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
    for first in [0, 10] {
        let what = format!("{what}, from mini-batch {first}");
        accumulate(&mut pipe, case, first, lengths, &what);
        assert!(pipe.gradients().expect("gradients").is_empty(), "{what}: not before the commit");
        let step = pipe.commit().unwrap_or_else(|error| panic!("{what}: {error}"));
        let (expected, seed) = whole(&plain, case, first, lengths, replicas);
        assert!((step.loss - expected).abs() < 1e-10, "{what}: {} not {expected}", step.loss);
        assert!((step.terms.iter().sum::<f64>() - expected).abs() < 1e-10, "{what}: its terms");
        assert_eq!(step.samples, lengths.iter().sum::<usize>(), "{what}");
        assert_eq!(step.seed, seed, "{what}: the first one's");
        if replicas == 1 {
            assert_eq!(step.sizes, [3, 2, 2, 1, 1, 2, 1, 1], "{what}");
        } else {
            let shares = [1, 0].map(|more| lengths.iter().map(|n| (n + more) / 2).sum::<usize>());
            assert_eq!(step.shares, shares, "{what}");
        }
        assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), &what);
        optimizer.update();
        plain.optimizer.update();
        // Includes the running statistics, which have changed once.
        assert_close(&pipe.variables().expect("variables"), &plain.values(), &what);
    }
}

#[test]
fn several_mini_batches_are_one_step() {
    let breadth_first = Schedule::BreadthFirst { stages_per_device: 3 };
    for case in &CASES {
        for (devices, schedule, recompute, locations) in [
            (1, Schedule::GPipe, Recompute::Never, Offload::Device),
            (3, Schedule::OneFOneB, Recompute::Never, Offload::Device),
            (2, Schedule::GPipe, Recompute::Always, Offload::Device),
            (2, INTERLEAVED, Recompute::ExceptLast, Offload::Device),
            (1, breadth_first, Recompute::ExceptLast, Offload::Host),
        ] {
            let what = format!("{}, {devices} devices, {schedule}, {recompute}", case.name);
            let builder = builder((case.layers)(), devices).schedule(schedule).offload(locations);
            let pipe = built(
                builder.recompute(recompute).micro_batches(MicroBatches::Count(MICRO_BATCHES)),
                &what,
            );
            compare(case, pipe, 1, &WINDOW, &what);
        }
    }
}

/// In some mini-batches, first or last, only one of the replicas has a sample.
#[test]
fn replicas_of_one_process_accumulate_too() {
    for case in &CASES {
        for lengths in [WINDOW, [1, 7, 4], [4, 7, 1], [1, 1, 1]] {
            let what = format!("{}, {lengths:?}", case.name);
            let builder = builder((case.layers)(), 4)
                .replicas(2)
                .micro_batches(MicroBatches::Count(MICRO_BATCHES));
            compare(case, built(builder, &what), 2, &lengths, &what);
        }
    }
}

/// Covers failures of the layers, the closure, its loss, and its inputs.
#[test]
fn a_mini_batch_that_fails_leaves_the_earlier_ones() {
    let kinds = [(3, 1), (4, 2)];
    for (case, (devices, replicas)) in
        [&MLP, &CNN, &GPT].into_iter().flat_map(|case| kinds.map(|kind| (case, kind)))
    {
        let build = || {
            let builder = builder((case.layers)(), devices).replicas(replicas);
            built(builder.micro_batches(MicroBatches::Count(MICRO_BATCHES)), case.name)
        };
        let (mut pipe, mut calm) = (build(), build());
        accumulate(&mut calm, case, 0, &WINDOW, case.name);
        let expected = calm.commit().expect("a step");

        let (x, y) = &case.data(WINDOW[0], 0);
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
        for (number, samples) in (0..).zip(WINDOW) {
            accumulate(&mut pipe, case, number, &[samples], case.name);
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
    tch::manual_seed(24);
    let mut pipe =
        builder(mlp(), 3).micro_batches(MicroBatches::Count(2)).build().expect("a pipeline");
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

    // Different trained parameters than those of the sums.
    pipe.freeze(|name| name.starts_with("fc2")).expect("frozen");
    pipe.accumulate(&x, &y, MLP.loss).expect_err("others are trained now");
    pipe.commit().expect_err("others are trained now");
    assert!(pipe.gradients().expect("gradients").is_empty());
    pipe.unfreeze(|_| true).expect("trained again");

    // An evaluation is not part of the window.
    let evaluated = pipe.evaluate(&x, &y, MLP.loss).expect("an evaluation").loss;
    let step = pipe.commit().expect("what was accumulated");
    let expected = plain.backward(&MLP, &x, &y, MicroBatches::Count(1), None);
    assert!((step.loss - expected).abs() < 1e-10 && (evaluated - expected).abs() < 1e-10);
    assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), "after all");
    assert_eq!(
        pipe.commit().expect_err("nothing any more"),
        Error::Step(StepError::NothingAccumulated)
    );
    assert_eq!(pipe.output_device(), test_device());
}
