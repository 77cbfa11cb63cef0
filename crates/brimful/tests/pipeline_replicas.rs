//! Several pipelines in one process, each with its part of every mini-batch, are the plain model.

mod support;

use brimful::pipeline::PipelineError;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Loss, Size};
use support::pipeline_cases::{CASES, CNN, Case, Cut, GPT, MLP, Plain, builder, compare, mlp};
use support::{alone, assert_all_close, assert_close, assert_fails, copies, test_device, tests};
use tch::{Kind, Tensor};

const REPLICAS: usize = 2;
const INTERLEAVED: Schedule = Schedule::Interleaved { stages_per_device: 2 };

/// Near-equal parts, and none where there are too few samples.
fn shares(samples: usize) -> [usize; REPLICAS] {
    [samples.div_ceil(REPLICAS), samples / REPLICAS]
}

fn every_cut(case: &Case) {
    let _turn = alone();
    tch::manual_seed(31);
    for (schedule, recompute) in [
        (Schedule::GPipe, Recompute::Never),
        (Schedule::OneFOneB, Recompute::ExceptLast),
        (INTERLEAVED, Recompute::Always),
    ] {
        // Even, ragged, one for a micro-batch, and fewer than replicas.
        for (samples, m) in [(8, 2), (13, 3), (3, 4), (1, 2)] {
            let what = format!("{}, {schedule}, {recompute}, {samples}/{m}", case.name);
            let pipe = builder((case.layers)(), 2 * REPLICAS)
                .replicas(REPLICAS)
                .schedule(schedule)
                .recompute(recompute)
                .micro_batches(m)
                .build()
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            let cut = Cut { samples, replicas: REPLICAS, micro_batches: m };
            for step in compare(case, pipe, cut, &what) {
                assert_eq!(
                    (step.samples, &step.shares[..]),
                    (samples, &shares(samples)[..]),
                    "{what}"
                );
                assert_eq!(step.outputs.size()[0], samples as i64, "{what}");
                assert_eq!(
                    step.timeline.expect("a pipeline's").spans.len(),
                    2 * REPLICAS,
                    "{what}"
                );
            }
        }
    }
}

tests! {
    mlp_in_two_pipelines => every_cut(&CASES[0]),
    cnn_with_deferred_batch_norm_in_two_pipelines => every_cut(&CASES[1]),
    u_net_with_skips_in_two_pipelines => every_cut(&CASES[2]),
    gpt_with_a_shared_table_and_dropout_in_two_pipelines => every_cut(&CASES[3]),
}

#[test]
fn any_loss_on_the_outputs_of_all_replicas() {
    let _turn = alone();
    tch::manual_seed(32);
    // Needs all rows at once.
    let loss = |out: &Tensor| {
        let rows = out.flatten(1, -1);
        rows.matmul(&rows.tr()).logsumexp([0], false).sum(Kind::Double)
    };
    for case in &CASES {
        for samples in [7, 1] {
            let what = format!("{}, {samples} samples", case.name);
            let mut pipe = builder((case.layers)(), 2 * REPLICAS)
                .replicas(REPLICAS)
                .micro_batches(2)
                .build()
                .expect("two pipelines");
            let plain = Plain::of(&(case.layers)(), &pipe);
            let x = (case.input)(samples as i64);
            let step = pipe.backward_whole(&x, |out| loss(out)).expect("a step");
            let here = x.to_device(test_device());
            let pieces =
                case.pieces(Cut { samples, replicas: REPLICAS, micro_batches: 2 }, step.seed);
            let outputs = pieces.iter().map(|piece| {
                let rows = here.narrow(0, piece.rows.start as i64, piece.rows.len() as i64);
                plain.model.forward_drawing(&[rows], true, piece.draws).swap_remove(0)
            });
            let all = Tensor::cat(&outputs.collect::<Vec<_>>(), 0);
            let expected = loss(&all);
            expected.backward();
            let value = expected.double_value(&[]);
            assert!((step.loss - value).abs() < 1e-9, "{what}: {} not {value}", step.loss);
            assert_eq!(step.terms, [step.loss], "{what}");
            assert_eq!((step.samples, &step.shares[..]), (samples, &shares(samples)[..]), "{what}");
            assert_all_close(&step.outputs, &all, &what);
            assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), &what);

            // The same in two calls; the GPT's dropout draws other numbers then.
            let seen = copies(&pipe.gradients().expect("gradients"));
            pipe.zero_grad().expect("cleared");
            if case.name != GPT.name {
                let out = pipe.forward(&x).expect("a forward");
                loss(&out).backward();
                pipe.backward_from(out).expect("a backward");
                assert_close(&pipe.gradients().expect("gradients"), &seen, &what);
            }
        }
    }
}

/// A failure in one pipeline undoes the step in all.
#[test]
fn a_step_that_fails_in_one_pipeline_leaves_nothing_in_any() {
    let _turn = alone();
    tch::manual_seed(33);
    let build = builder((CNN.layers)(), 2 * REPLICAS).replicas(REPLICAS).micro_batches(2);
    let mut pipe = build.build().expect("two pipelines");
    let before = copies(&pipe.variables().expect("variables"));
    let (x, y) = ((CNN.input)(8), (CNN.target)(8));
    for failing in 0..4 {
        let mut calls = 0;
        let error = pipe.backward(&x, &y, move |out: Tensor, y: &Tensor| {
            calls += 1;
            assert!(calls <= failing, "call {calls} gives up");
            (CNN.loss)(out, y)
        });
        assert_fails(error, &["gives up"]);
        assert!(pipe.gradients().expect("gradients").is_empty(), "call {failing}");
        assert_close(&pipe.variables().expect("variables"), &before, "as before");
    }
    let plain = Plain::of(&(CNN.layers)(), &pipe);
    let step = pipe.backward(&x, &y, CNN.loss).expect("the next step");
    let cut = Cut { samples: 8, replicas: REPLICAS, micro_batches: 2 };
    plain.backward_pieces(&CNN, &x, &y, &CNN.pieces(cut, step.seed));
    assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), "the next step");
    assert_close(&pipe.variables().expect("variables"), &plain.values(), "the next step");
}

#[test]
fn all_replicas_have_one_models_values() {
    let _turn = alone();
    tch::manual_seed(34);
    let mut pipe = builder(mlp(), 4).replicas(2).micro_batches(1).build().expect("two pipelines");
    assert_eq!(pipe.devices().len(), 4);
    assert_eq!(pipe.balance().sizes().len(), 2);
    assert_eq!(pipe.variables().expect("variables").len(), 10, "each once");
    // What is set and frozen is so in all of them.
    let other = builder(mlp(), 1).build().expect("a pipeline");
    pipe.set_variables(other.variables().expect("variables")).expect("set");
    assert_fails(pipe.freeze(|name| name == "nobody"), &["the first of 10 is"]);
    pipe.freeze(|name| name.starts_with("fc1")).expect("frozen");
    let plain = Plain::of(&mlp(), &other);
    let (x, y) = ((MLP.input)(6), (MLP.target)(6));
    let step = pipe.backward(&x, &y, MLP.loss).expect("a step");
    let expected = plain.backward(&MLP, &x, &y, Size::Count(1), None);
    assert!((step.loss - expected).abs() < 1e-10);
    let expected = plain.gradients().into_iter();
    let expected: Vec<_> = expected.filter(|(name, _)| !name.starts_with("fc1")).collect();
    assert_close(&pipe.gradients().expect("gradients"), &expected, "frozen");
}

#[test]
fn devices_that_cannot_be_dealt_out_are_refused() {
    for (devices, replicas) in [(3, 2), (2, 0), (2, 4)] {
        let error = builder(mlp(), devices).replicas(replicas).build().expect_err("uneven");
        assert_eq!(error, PipelineError::UnevenReplicas { devices, replicas }.into());
    }
    let mut pipe = builder(mlp(), 2).replicas(2).build().expect("two of one stage each");
    assert_eq!(pipe.balance().sizes(), [8]);
    let x = (MLP.input)(4);
    pipe.backward(&x, &(), |out: Tensor, ()| Loss::sum(out.sum(None))).expect("a step");
}
