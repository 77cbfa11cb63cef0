//! Several pipelines in one process, each with its part of every mini-batch, are the plain model.

mod support;

use brimful::Loss;
use brimful::pipeline::PipelineError;
use brimful::schedule::{Recompute, Schedule};
use support::pipeline_cases::{
    CASES, Case, Cut, INTERLEAVED, MLP, Reference, builder, built, compare_whole, mlp,
};
use support::{alone, tests};
use tch::Tensor;

const REPLICAS: usize = 2;

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
        let stages = pipe.balance().sizes().len();
        assert_eq!(stages, 2 * schedule.stages_per_device(), "{what}");
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
