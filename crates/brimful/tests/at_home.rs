//! Stages that live on the host: what they take of the device, and everything that is done to a model
//! beside a step, as on a device.

mod support;

use brimful::balance;
use brimful::memory::Arena;
use brimful::optim::{Adam, AdamW, Method, Sgd};
use brimful::pipeline::{Builder, Homes};
use brimful::plan::{PlanDevice, PlannedStep, Request, plan};
use brimful::schedule::{Home, Schedule};
use brimful::{Bytes, DeviceSpec, Layers, Loss, NonFinite, Pipeline};
use support::pipeline_cases::{GPT, MLP, builder, mlp};
use support::{alone, assert_close, assert_same, numbers, test_device};
use tch::{Device, Kind, Tensor, nn};

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
    let builder = Pipeline::builder(deep(blocks)).schedule(schedule).homes(Homes::Host);
    train_deep(builder.micro_batches(micro_batches), &device, micro_batches);
    device.peak()
}

/// Two steps, with micro-batches of 16 samples.
fn train_deep(builder: Builder, device: &Arena, micro_batches: usize) {
    let device = DeviceSpec::from(device.clone()).threads(1);
    let mut pipe = builder.devices([device]).build().expect("a pipeline");
    let mut optimizer = pipe.optimizer(Adam::new(0.1)).expect("an optimizer");
    let x = numbers(&[16 * micro_batches as i64, 64], 1).to_kind(Kind::Float);
    for _ in 0..2 {
        let step = pipe
            .backward(&x, &x, |out: Tensor, x| Loss::mean((out - x).square().mean(Kind::Float)));
        step.expect("a step");
        optimizer.step().expect("an update");
        optimizer.zero_grad().expect("cleared");
    }
}

#[test]
fn a_plan_leaves_on_the_device_what_fits_there_and_is_kept() {
    let _turn = alone();
    const BLOCKS: usize = 12;
    const MICRO_BATCHES: usize = 4;
    // Weights, gradients and Adam's moments of all blocks take 800 kB.
    const LIMIT: u64 = 600_000;
    let sample = numbers(&[16, 64], 1).to_kind(Kind::Float);
    let profile = balance::measure(&deep(BLOCKS), Device::Cpu, &sample).expect("a profile");
    let device = PlanDevice { memory: Some(LIMIT), ..PlanDevice::default() };
    let mut request = Request::new(&profile, vec![device], 16 * MICRO_BATCHES);
    request.micro_batches = vec![MICRO_BATCHES];
    request.optimizer_bytes = 2.0;
    request.host_memory = Some(1 << 30);
    let planned = plan(&request).expect("a plan");
    let row = planned.best().expect("something that fits");
    assert!((1..BLOCKS).contains(&row.at_host()), "{:?}", row.stages);
    let mut pipe = Pipeline::builder(deep(BLOCKS)).plan(row).build().expect("a pipeline");
    let step = PlannedStep::new(&request, row).expect("the same step");
    assert_eq!(*pipe.actions(MICRO_BATCHES).expect("actions"), step.actions, "as it was planned");
    let arena = Arena::limited("device", LIMIT).expect("a limit");
    let builder = Pipeline::builder(deep(BLOCKS)).plan(row).reserve(Adam::new(0.1));
    train_deep(builder, &arena, MICRO_BATCHES);
}

/// A shared table is one tensor: a stage that has it on the device would look for it where the other has it.
#[test]
fn stages_that_share_a_parameter_live_in_one_place() {
    let _turn = alone();
    let at_home = |layers: Layers, each: [Home; STAGES]| {
        let pipe = homes(layers, each.into()).build().expect("a pipeline");
        pipe.stages_at_home().expect("a number")
    };
    let [device, host] = [Home::Device, Home::Host];
    assert_eq!(at_home((GPT.layers)(), [host, device, device, device]), 2, "with the head");
    assert_eq!(at_home((GPT.layers)(), [device, device, device, host]), 2, "with the table");
    assert_eq!(at_home((GPT.layers)(), [device, host, device, device]), 1, "nothing is shared");
    assert_eq!(at_home(mlp(), [host, device, device, device]), 1, "nothing is shared");
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
    let refusal = |bytes: u64, method: Option<Method>| {
        let small = Arena::limited("host", bytes).expect("a limit");
        let builder = homes(mlp(), Homes::Host).host(small.clone());
        let builder = method.into_iter().fold(builder, Builder::reserve);
        let error = builder.build().map(drop).expect_err("no room");
        assert_eq!(small.peak(), 0, "nothing was allocated before: {error}");
        error.to_string()
    };
    let numbers = mlp().parameter_count().expect("a model");
    let refused = refusal(8 * numbers, None);
    let said = format!("4 stages that live on the host need {}", Bytes(16 * numbers));
    assert!(refused.starts_with(&said), "{refused}");
    assert!(refused.contains(&format!("but it has {}:", Bytes(8 * numbers))), "{refused}");
    // Weights and gradients would fit, Adam's moments do not.
    let refused = refusal(20 * numbers, Some(Adam::new(0.1).into()));
    assert!(refused.contains("optimizer that keeps less"), "{refused}");
    let error = homes(mlp(), vec![].into()).build().map(drop).expect_err("none");
    assert!(error.to_string().contains("homes of 0 stages were given"), "{error}");
}

#[test]
fn updates_that_follow_the_backward_come_to_the_same() {
    let _turn = alone();
    let mean = |out: Tensor, _: &Tensor| Loss::mean(out.square().mean(Kind::Double));
    for case in [MLP, GPT] {
        let trained = [false, true].map(|follow| {
            tch::manual_seed(3);
            let mut pipe = homes((case.layers)(), Homes::Host).build().expect("a pipeline");
            let mut optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
            optimizer.follow_backward(follow).expect("on one device");
            for seed in 0..3 {
                tch::manual_seed(seed);
                let (x, y) = ((case.input)(7), (case.target)(7));
                pipe.backward(&x, &y, mean).expect("a step");
                assert_eq!(pipe.gradients().expect("gradients").is_empty(), follow);
                optimizer.step().expect("what is left to update");
                optimizer.zero_grad().expect("cleared");
            }
            pipe.variables().expect("variables")
        });
        assert_close(&trained[1], &trained[0], case.name);
    }
}

#[test]
fn a_step_that_fails_behind_an_update_says_so_and_others_are_refused_before() {
    let _turn = alone();
    let (x, y) = batch();
    let fails = |x: &Tensor| {
        assert!(!brimful::pipeline::is_recomputing(), "no second time");
        x.shallow_clone()
    };
    let layers = Layers::new().add_fn("fails", fails).add_layers("rest", mlp());
    let mut pipe = homes(layers, Homes::Host).build().expect("a pipeline");
    let mut optimizer = pipe.optimizer(Sgd::new(0.1)).expect("an optimizer");
    optimizer.follow_backward(true).expect("on one device");
    let refused = pipe.accumulate(&x, &y, MLP.loss).map(drop).expect_err("a part of a step");
    assert!(refused.to_string().contains("one mini-batch"), "{refused}");
    let before = pipe.variables().expect("variables");
    let ratio = |out: Tensor, y: &Tensor| {
        Loss::ratio(out.square().sum(Kind::Double), y.ne(-1).sum(Kind::Double))
    };
    let refused = pipe.backward(&x, &y, ratio).map(drop).expect_err("an unknown denominator");
    assert!(refused.to_string().contains("Loss::mean"), "{refused}");
    assert_same("refused", &pipe.variables().expect("variables"), &before);
    let failed = pipe.backward(&x, &y, MLP.loss).map(drop).expect_err("half a step").to_string();
    assert!(
        failed.contains("had followed the backward") && failed.contains("no second time"),
        "{failed}"
    );
    optimizer.follow_backward(false).expect("as before");
    let failed = pipe.backward(&x, &y, MLP.loss).map(drop).expect_err("no step").to_string();
    assert!(!failed.contains("followed"), "{failed}");
}
