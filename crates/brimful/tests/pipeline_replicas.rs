//! Several pipelines in one process, each with its part of every mini-batch, are the plain model.

mod support;

use brimful::pipeline::PipelineError;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Loss, Size};
use support::pipeline_cases::{
    CASES, Case, Cut, MLP, Plain, Reference, builder, built, compare_whole, mlp,
};
use support::{alone, assert_close, assert_fails, tests};
use tch::Tensor;

const REPLICAS: usize = 2;
const INTERLEAVED: Schedule = Schedule::Interleaved { stages_per_device: 2 };

fn every_cut(case: &Case) {
    let _turn = alone();
    // Even, ragged, one for a micro-batch, and fewer than replicas.
    let references = Reference::of_cuts(case, REPLICAS, &[(8, 2), (13, 3), (3, 4), (1, 2)]);
    for (schedule, recompute) in [
        (Schedule::GPipe, Recompute::Never),
        (Schedule::OneFOneB, Recompute::ExceptLast),
        (INTERLEAVED, Recompute::Always),
    ] {
        let what = format!("{}, {schedule}, {recompute}", case.name);
        let builder = builder((case.layers)(), 2 * REPLICAS).replicas(REPLICAS);
        let mut pipe = built(builder.schedule(schedule).recompute(recompute), &what);
        assert_eq!(pipe.devices().len(), 2 * REPLICAS, "{what}");
        references.iter().for_each(|reference| reference.compare(&mut pipe, &what));
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
    for case in &CASES {
        for samples in [7, 1] {
            let what = format!("{}, {samples} samples", case.name);
            let cut = Cut { samples, replicas: REPLICAS, micro_batches: 2 };
            let builder = builder((case.layers)(), 2 * REPLICAS).replicas(REPLICAS);
            compare_whole(case, built(builder.micro_batches(2), &what), cut, &what);
        }
    }
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
