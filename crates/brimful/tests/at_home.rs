//! Stages that live on the host: what they take of the device, and everything that is done to a model
//! beside a step, as on a device.

mod support;

use brimful::memory::Arena;
use brimful::optim::{Adam, AdamW, Method, Sgd};
use brimful::pipeline::{Builder, Homes};
use brimful::schedule::Schedule;
use brimful::{DeviceSpec, Error, Layers, Loss, NonFinite, Pipeline};
use support::pipeline_cases::{GPT, MLP, builder, mlp};
use support::{alone, assert_close, assert_same, numbers, test_device};
use tch::{Kind, Tensor, nn};

const STAGES: usize = 4;

fn homes(layers: Layers, homes: Homes) -> Builder {
    let schedule = Schedule::BreadthFirst { stages_per_device: STAGES };
    builder(layers, 1).schedule(schedule).homes(homes).micro_batches(3)
}

/// The same model on its device and at home, with the same first values.
fn both(layers: fn() -> Layers) -> [Pipeline; 2] {
    [Homes::Device, Homes::Host].map(|home| {
        tch::manual_seed(3);
        homes(layers(), home).build().expect("a pipeline")
    })
}

fn batch() -> (Tensor, Tensor) {
    tch::manual_seed(4);
    ((MLP.input)(7), (MLP.target)(7))
}

#[test]
fn every_optimizer_and_clipping_are_as_on_the_device() {
    let _turn = alone();
    let methods: [Method; 3] = [
        Sgd::new(0.1).momentum(0.9).into(),
        Adam::new(0.01).into(),
        AdamW::new(0.01).weight_decay(0.1).into(),
    ];
    for method in methods {
        for layers in [MLP, GPT] {
            let trained = both(layers.layers).map(|mut pipe| {
                let mut optimizer = pipe.optimizer(method).expect("an optimizer");
                let mut norms = Vec::new();
                for seed in 0..3 {
                    tch::manual_seed(seed);
                    let (x, y) = ((layers.input)(7), (layers.target)(7));
                    pipe.backward(&x, &y, layers.loss).expect("a step");
                    norms.push(optimizer.clip_gradient_norm(0.05).expect("a norm"));
                    optimizer.step().expect("an update");
                    optimizer.zero_grad().expect("cleared");
                }
                (norms, pipe.variables().expect("variables"))
            });
            let [(norms, device), (at_home, host)] = trained;
            let far = norms.iter().zip(&at_home).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-10, "{norms:?} and {at_home:?}");
            assert_close(&host, &device, layers.name);
        }
    }
}

#[test]
fn gradients_that_were_there_are_added_to_and_windows_are_kept() {
    let _turn = alone();
    let (x, y) = batch();
    let [device, host] = both(mlp).map(|mut pipe| {
        pipe.backward(&x, &y, MLP.loss).expect("a step");
        pipe.backward(&x, &y, MLP.loss).expect("another, on top");
        let twice = pipe.gradients().expect("gradients");
        pipe.zero_grad().expect("cleared");
        pipe.accumulate(&x, &y, MLP.loss).expect("a part");
        pipe.accumulate(&x, &y, MLP.loss).expect("a part");
        pipe.commit().expect("a step of both");
        (twice, pipe.gradients().expect("gradients"))
    });
    assert_close(&host.0, &device.0, "twice");
    assert_close(&host.1, &device.1, "a window");
}

#[test]
fn frozen_parameters_stay_and_have_no_gradient() {
    let _turn = alone();
    let (x, y) = batch();
    let [device, host] = both(mlp).map(|mut pipe| {
        pipe.freeze(|name| name.starts_with("fc2") || name == "fc4.bias").expect("frozen");
        pipe.backward(&x, &y, MLP.loss).expect("a step");
        pipe.gradients().expect("gradients")
    });
    assert_eq!(device.len(), 7);
    assert_close(&host, &device, "frozen");
}

#[test]
fn what_was_saved_at_home_is_a_model_like_others() {
    let _turn = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    let [mut device, mut host] = both(mlp);
    let mut optimizer = host.optimizer(Adam::new(0.1)).expect("an optimizer");
    let (x, y) = batch();
    host.backward(&x, &y, MLP.loss).expect("a step");
    optimizer.step().expect("an update, which is waited for below");
    host.save(&path).expect("saved");
    device.load(&path).expect("loaded");
    let values = host.variables().expect("variables");
    assert_close(&device.variables().expect("variables"), &values, "saved");
    host.backward(&x, &y, MLP.loss).expect("a step");
    optimizer.step().expect("an update");
    host.load(&path).expect("loaded over an update under way");
    assert_same("loaded", &host.variables().expect("variables"), &values);
}

#[test]
fn half_precision_has_f32_gradients_at_home() {
    let _turn = alone();
    let (x, y) = batch();
    let [device, host] = [Homes::Device, Homes::Host].map(|home| {
        tch::manual_seed(3);
        let mut pipe = homes(mlp(), home).kind(Kind::BFloat16).build().expect("a pipeline of bf16");
        let mut optimizer = pipe.optimizer(AdamW::new(0.1)).expect("an optimizer");
        pipe.backward(&x.to_kind(Kind::BFloat16), &y, MLP.loss).expect("a step");
        let gradients = pipe.gradients().expect("gradients");
        optimizer.step().expect("an update");
        (gradients, pipe.variables().expect("variables"))
    });
    assert!(device.0.iter().all(|(_, gradient)| gradient.kind() == Kind::BFloat16));
    assert!(host.0.iter().all(|(_, gradient)| gradient.kind() == Kind::Float));
    let rounded = host.0.iter().map(|(name, g)| (name.clone(), g.to_kind(Kind::BFloat16)));
    let on_cpu = |list: Vec<(String, Tensor)>| -> Vec<(String, Tensor)> {
        list.into_iter().map(|(name, value)| (name, value.to_device(tch::Device::Cpu))).collect()
    };
    assert_same("rounded", &rounded.collect::<Vec<_>>(), &on_cpu(device.0));
    assert!(host.1.iter().all(|(_, value)| value.kind() == Kind::BFloat16));
}

/// A layer that adds nothing, and whose gradient is none: 0 times the slope of a root at 0.
fn odd(p: &nn::Path) -> impl nn::Module + use<> {
    let root = p.zeros("root", &[4]);
    nn::func(move |x| x + root.sqrt() * 0.0)
}

fn even(p: &nn::Path) -> impl nn::Module + use<> {
    nn::linear(p, 4, 4, Default::default())
}

#[test]
fn a_gradient_that_is_not_finite_is_found_in_whatever_stage() {
    let _turn = alone();
    for place in 0..STAGES {
        let layers = (0..STAGES).fold(Layers::new(), |layers, number| match number == place {
            true => layers.add(number.to_string(), odd),
            false => layers.add(number.to_string(), even),
        });
        let mut pipe = homes(layers, Homes::Host)
            .non_finite(NonFinite::RefuseGradients)
            .build()
            .expect("a pipeline");
        let x = numbers(&[7, 4], 1);
        let mean = |out: Tensor, _: &Tensor| Loss::mean(out.square().mean(Kind::Double));
        let refused = pipe.backward(&x, &x, mean).map(drop).expect_err("not finite");
        assert!(refused.to_string().contains("finite"), "stage {place}: {refused}");
        assert!(pipe.gradients().expect("gradients").is_empty(), "stage {place}");
    }
}

/// Blocks of one size, so many of them.
fn deep(blocks: usize) -> Layers {
    (0..blocks).fold(Layers::new(), |layers, number| {
        layers.add(format!("block{number}"), |p| nn::linear(p, 64, 64, Default::default()))
    })
}

fn peak(blocks: usize, micro_batches: usize) -> u64 {
    let device = Arena::new("device");
    let schedule = Schedule::BreadthFirst { stages_per_device: blocks };
    let mut pipe = Pipeline::builder(deep(blocks))
        .devices([DeviceSpec::from(device.clone()).threads(1)])
        .schedule(schedule)
        .homes(Homes::Host)
        .micro_batches(micro_batches)
        .build()
        .expect("a pipeline");
    let mut optimizer = pipe.optimizer(Adam::new(0.1)).expect("an optimizer");
    let x = numbers(&[16 * micro_batches as i64, 64], 1).to_kind(Kind::Float);
    for _ in 0..2 {
        let step = pipe
            .backward(&x, &x, |out: Tensor, x| Loss::mean((out - x).square().mean(Kind::Float)));
        step.expect("a step");
        optimizer.step().expect("an update");
        optimizer.zero_grad().expect("cleared");
    }
    device.peak()
}

#[test]
fn neither_more_stages_nor_more_samples_need_more_of_the_device() {
    let _turn = alone();
    let least = peak(3, 3);
    for (blocks, micro_batches) in [(12, 3), (3, 24), (24, 24)] {
        let more = peak(blocks, micro_batches);
        let few = least + least / 20;
        assert!(more <= few, "{blocks} × {micro_batches}: {more} bytes, and {least} for 3 × 3");
    }
}

#[test]
fn a_host_without_room_says_so_and_a_wrong_number_of_homes_too() {
    let _turn = alone();
    if test_device() != tch::Device::Cpu {
        return;
    }
    let small = Arena::limited("host", 4096).expect("a limit");
    let error = homes(mlp(), Homes::Host).host(small).build().map(drop).expect_err("no room");
    assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
    assert!(error.to_string().contains("'host'"), "{error}");
    let error = homes(mlp(), vec![].into()).build().map(drop).expect_err("none");
    assert!(error.to_string().contains("homes of 0 stages were given"), "{error}");
}
