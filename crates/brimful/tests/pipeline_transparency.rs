//! A pipelined step is the plain model's step: outputs, loss, gradients, and parameters after three
//! steps of Adam, for every schedule, recompute mode, number of stages and of micro-batches.

mod pipeline_models;

use brimful::optim::Adam;
use brimful::pipeline::StageDevice;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Pipeline, Size};
use pipeline_models::{
    CNN, Case, GPT, MLP, Plain, U_NET, alone, assert_close, builder, test_device,
};
use tch::Device;
use tch::nn::ModuleT;

/// Three steps of both, compared at every turn.
fn compare(case: &Case, mut pipe: Pipeline, samples: i64, m: usize, what: &str) {
    let layers = (case.layers)();
    let mut plain = Plain::of(&layers, &pipe);
    let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
    // Where the cut does not show, the plain model takes the whole mini-batch at once.
    let size = if case.shows_cut { Size::Count(m) } else { Size::Count(1) };
    for number in 0..3 {
        let what = format!("{what}, step {number}");
        let (x, y) = ((case.input)(samples), (case.target)(samples));
        let loss = case.loss;
        let step = pipe.step(&x, &y, loss).unwrap_or_else(|error| panic!("{what}: {error}"));
        let expected = plain.backward(case, &x, &y, size, step.seed);
        assert!((step.loss - expected).abs() < 1e-10, "{what}: {} not {expected}", step.loss);
        assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), &what);
        optimizer.step().expect("a step");
        optimizer.zero_grad().expect("cleared");
        plain.optimizer.step().expect("a step");
        plain.optimizer.zero_grad().expect("cleared");
        assert_close(&pipe.variables().expect("variables"), &plain.values(), &what);
    }
    let x = (case.input)(samples);
    let out = pipe.eval(&x, m + 1).expect("an evaluation");
    let x = x.to_device(test_device());
    let expected = tch::no_grad(|| plain.model.forward_t(&x, false));
    assert_close(&[(String::new(), out)], &[(String::new(), expected)], what);
}

fn every_schedule(case: &Case) {
    let _turn = alone();
    tch::manual_seed(7);
    for devices in 1..=4 {
        let interleaved = Schedule::Interleaved { stages_per_device: 2 };
        for schedule in [Schedule::GPipe, Schedule::OneFOneB, interleaved] {
            if (case.layers)().len() < devices * schedule.stages_per_device() {
                continue;
            }
            for recompute in Recompute::ALL {
                // The last one is ragged: 13 samples.
                for (samples, m) in [(8, 1), (9, 3), (8, 8), (13, 4)] {
                    let what = format!(
                        "{}, {devices} devices, {schedule}, {recompute}, {samples}/{m}",
                        case.name
                    );
                    let pipe = builder((case.layers)(), devices)
                        .schedule(schedule)
                        .recompute(recompute)
                        .micro_batches(m)
                        .build()
                        .unwrap_or_else(|error| panic!("{what}: {error}"));
                    compare(case, pipe, samples, m, &what);
                }
            }
        }
    }
}

#[test]
fn mlp() {
    every_schedule(&MLP);
}

#[test]
fn cnn_with_deferred_batch_norm() {
    every_schedule(&CNN);
}

#[test]
fn u_net_with_skips_across_stages() {
    every_schedule(&U_NET);
}

#[test]
fn gpt_with_a_shared_table_and_dropout() {
    every_schedule(&GPT);
}

/// Where the device that is tested is no CPU, every boundary and skip changes its device here.
#[test]
fn a_mix_of_devices() {
    let _turn = alone();
    tch::manual_seed(8);
    for case in [&MLP, &CNN, &U_NET] {
        for recompute in Recompute::ALL {
            let devices = [test_device(), Device::Cpu, test_device(), Device::Cpu];
            let pipe = builder((case.layers)(), 0)
                .devices(devices.map(|device| StageDevice::from(device).threads(1)))
                .recompute(recompute)
                .micro_batches(4)
                .build()
                .expect("a pipeline");
            compare(case, pipe, 9, 4, &format!("{}, {recompute}, a mix", case.name));
        }
    }
}
