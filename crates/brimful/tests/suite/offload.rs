//! Offloaded stages: their device memory, and all calls besides a step, with the same results as on a device.

use std::collections::BTreeSet;

use crate::support::pipeline_cases::{Case, GPT, MLP, Plain, U_NET, builder, mlp};
use crate::support::{
    Named, Update, assert_close, assert_fails, assert_same, copies, numbers, test_device,
};
use brimful::balance;
use brimful::loss::LossError;
use brimful::memory::Arena;
use brimful::optim::{Adam, AdamW, Method, Optimizer, Sgd};
use brimful::pipeline::{Builder, Offload, PipelineError};
use brimful::plan::{PlanDevice, Request, plan};
use brimful::schedule::{
    Action, ActionKind, HostLinkUse, Location, MicroBatchId, Schedule, StageId,
};
use brimful::{
    Bytes, DeviceSpec, Error, Layers, Loss, MicroBatches, NonFinitePolicy, Pipeline, Timeline,
};
use brimful_plan::plan::PlannedStep;
use brimful_plan::schedule::{
    Awaited, StageLocation, Transfer, TransferKind, TransferSpan, Transfers,
};
use tch::{Device, Kind, Tensor, nn};

const STAGES: usize = 4;

fn offloaded(layers: Layers, offload: Offload) -> Builder {
    let schedule = Schedule::BreadthFirst { stages_per_device: STAGES };
    builder(layers, 1).schedule(schedule).offload(offload).micro_batches(MicroBatches::Count(3))
}

/// On a CPU, uses one arena for the device and one for the host.
fn between_arenas(builder: Builder) -> Builder {
    match test_device() {
        Device::Cpu => {
            let device = DeviceSpec::from(Arena::new("device")).threads(1);
            builder.devices([device]).host(Arena::new("host"))
        }
        _ => builder,
    }
}

/// Builds the model on its device and offloaded, with the same initial values.
fn both(layers: fn() -> Layers) -> [Pipeline; 2] {
    [Offload::Device, Offload::Host].map(|location| {
        tch::manual_seed(3);
        offloaded(layers(), location).build().expect("a pipeline")
    })
}

fn batch() -> (Tensor, Tensor) {
    MLP.data(7, 0)
}

#[test]
fn what_was_saved_offloaded_is_a_model_like_others() {
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
fn half_precision_has_f32_gradients_on_the_host() {
    let (x, y) = batch();
    let [device, host] = [Offload::Device, Offload::Host].map(|location| {
        tch::manual_seed(3);
        let mut pipe =
            offloaded(mlp(), location).kind(Kind::BFloat16).build().expect("a pipeline of bf16");
        let mut optimizer = pipe.optimizer(AdamW::new(0.1)).expect("an optimizer");
        pipe.backward(&x.to_kind(Kind::BFloat16), &y, MLP.loss).expect("a step");
        let gradients = pipe.gradients().expect("gradients");
        optimizer.step().expect("an update");
        (gradients, pipe.variables().expect("variables"))
    });
    assert!(device.0.iter().all(|(_, gradient)| gradient.kind() == Kind::BFloat16));
    assert!(host.0.iter().all(|(_, gradient)| gradient.kind() == Kind::Float));
    let rounded = host.0.iter().map(|(name, g)| (name.clone(), g.to_kind(Kind::BFloat16)));
    let on_cpu = |list: Named| -> Named {
        list.into_iter().map(|(name, value)| (name, value.to_device(Device::Cpu))).collect()
    };
    assert_same("rounded", &rounded.collect::<Vec<_>>(), &on_cpu(device.0));
    assert!(host.1.iter().all(|(_, value)| value.kind() == Kind::BFloat16));
}

/// Trains in bf16 with gradients of this dtype on the host; returns them, and the trained values.
fn in_bf16(gradients: Kind) -> (Named, Named) {
    tch::manual_seed(3);
    let builder = offloaded(mlp(), Offload::Host).kind(Kind::BFloat16).offload_gradients(gradients);
    let mut pipe = builder.build().expect("a pipeline of bf16");
    let mut optimizer = pipe.optimizer(AdamW::new(0.1)).expect("an optimizer");
    let (x, y) = batch();
    let x = x.to_kind(Kind::BFloat16);
    pipe.backward(&x, &y, MLP.loss).expect("a step");
    let sent = copies(&pipe.gradients().expect("gradients"));
    // Over several mini-batches, and beside gradients that are there already.
    pipe.accumulate(&x, &y, MLP.loss).expect("a part");
    pipe.accumulate(&x, &y, MLP.loss).expect("another part");
    pipe.commit().expect("a step");
    for _ in 0..2 {
        optimizer.update();
        pipe.backward(&x, &y, MLP.loss).expect("a step");
    }
    optimizer.update();
    (sent, pipe.variables().expect("variables"))
}

#[test]
fn gradients_on_the_host_are_rounded_for_a_model_in_bf16_alone() {
    let ((wide, _), (narrow, trained)) = (in_bf16(Kind::Float), in_bf16(Kind::BFloat16));
    let rounded = wide.iter().map(|(name, g)| (name.clone(), g.to_kind(Kind::BFloat16)));
    assert_same("rounded", &narrow, &rounded.collect::<Vec<_>>());
    assert!(trained.iter().all(|(_, value)| value.isfinite().all().int64_value(&[]) == 1));
    for kind in [Kind::Float, Kind::Half, Kind::Double] {
        let builder = offloaded(mlp(), Offload::Host).kind(kind).offload_gradients(Kind::BFloat16);
        let refused = builder.build().map(drop);
        assert_fails(refused, &["gradients on the host in BFloat16", "keep its gradients in f32"]);
    }
}

#[test]
fn a_wait_outlasts_freezing_and_groups_take_options_until_the_first_step() {
    let (x, y) = batch();
    let trained = both(mlp).map(|mut pipe| {
        let mut optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
        pipe.freeze(|name| name.ends_with("bias")).expect("frozen");
        pipe.backward(&x, &y, MLP.loss).expect("a step");
        let sgd = Sgd::new(0.1).momentum(0.9);
        optimizer.group("first", |name| name.starts_with("fc1"), sgd).expect("a group");
        for frozen in [true, false, true] {
            optimizer.update();
            match frozen {
                false => pipe.freeze(|name| name.ends_with("weight")).expect("frozen"),
                true => pipe.unfreeze(|_| true).expect("trained again"),
            }
            pipe.backward(&x, &y, MLP.loss).expect("a step");
        }
        optimizer.update();
        pipe.variables().expect("variables")
    });
    let [device, host] = trained;
    assert_close(&host, &device, "frozen while updates wait");
}

#[test]
fn losses_on_all_outputs_update_in_the_backward_too() {
    let (x, y) = batch();
    let trained = [false, true].map(|updates_in_backward| {
        tch::manual_seed(3);
        let builder = offloaded(mlp(), Offload::Host).update_in_backward(updates_in_backward);
        let mut pipe = builder.build().expect("a pipeline");
        let mut optimizer = pipe.optimizer(Sgd::new(0.1)).expect("an optimizer");
        let loss = |out: &Tensor| out.square().mean(Kind::Double);
        for _ in 0..2 {
            pipe.backward_whole(&x, |out| loss(out)).expect("a step");
            assert_eq!(pipe.gradients().expect("gradients").is_empty(), updates_in_backward);
            optimizer.update();
            let out = pipe.forward(&x).expect("outputs");
            loss(&out).backward();
            pipe.backward_from(out).expect("a step");
            assert_eq!(pipe.gradients().expect("gradients").is_empty(), updates_in_backward);
            optimizer.update();
            pipe.backward(&x, &y, MLP.loss).expect("a step");
            optimizer.update();
        }
        pipe.variables().expect("variables")
    });
    assert_close(&trained[1], &trained[0], "on all outputs");
}

/// Fails every allocation on the device and on the host: an update that waits is taken once, even with a single
/// buffer for optimizer state.
#[test]
fn an_update_that_waits_outlasts_memory_that_runs_out() {
    if test_device() != Device::Cpu {
        return;
    }
    let (x, y) = batch();
    let train = |which: usize, n: u64| {
        tch::manual_seed(3);
        let arenas = [Arena::new("device"), Arena::new("host")];
        let spec = DeviceSpec::from(arenas[0].clone()).threads(1);
        let builder = offloaded(mlp(), Offload::Host).devices([spec]).host(arenas[1].clone());
        let mut pipe = builder.build().expect("a pipeline");
        let mut optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
        arenas[which].fail_nth_allocation(n);
        for _ in 0..3 {
            if pipe.backward(&x, &y, MLP.loss).is_err() {
                pipe.backward(&x, &y, MLP.loss).expect("memory again");
            }
            if optimizer.step().is_err() {
                optimizer.step().expect("memory again");
            }
            optimizer.zero_grad().expect("cleared");
        }
        let failed = optimizer.wait().is_err();
        arenas[which].fail_nth_allocation(0);
        if failed {
            optimizer.wait().expect("memory again");
        }
        (arenas[which].refusals(), pipe.variables().expect("variables"))
    };
    let (_, expected) = train(0, 0);
    for which in [0, 1] {
        for n in 1.. {
            let (refusals, values) = train(which, n);
            assert_close(&values, &expected, &format!("allocation {n} of memory {which}"));
            if refusals == 0 {
                break;
            }
        }
    }
}

/// Layer that adds nothing and whose gradient is NaN: 0 times the slope of a root at 0.
fn odd(p: &nn::Path) -> impl nn::Module + use<> {
    let root = p.zeros("root", &[4]);
    nn::func(move |x| x + root.sqrt() * 0.0)
}

fn even(p: &nn::Path) -> impl nn::Module + use<> {
    nn::linear(p, 4, 4, Default::default())
}

#[test]
fn a_gradient_that_is_not_finite_is_found_in_whatever_stage() {
    for place in 0..STAGES {
        let layers = (0..STAGES).fold(Layers::new(), |layers, number| match number == place {
            true => layers.add(number.to_string(), odd),
            false => layers.add(number.to_string(), even),
        });
        let mut pipe = offloaded(layers, Offload::Host)
            .non_finite(NonFinitePolicy::RefuseGradients)
            .build()
            .expect("a pipeline");
        let x = numbers(&[7, 4], 1);
        let mean = |out: Tensor, _: &Tensor| Loss::mean(out.square().mean(Kind::Double));
        let refused = pipe.backward(&x, &x, mean).map(drop).expect_err("not finite");
        assert!(refused.to_string().contains("finite"), "stage {place}: {refused}");
        assert!(pipe.gradients().expect("gradients").is_empty(), "stage {place}");
    }
}

/// Stack of equal blocks.
fn deep(blocks: usize) -> Layers {
    (0..blocks).fold(Layers::new(), |layers, number| {
        layers.add(format!("block{number}"), |p| nn::linear(p, 64, 64, Default::default()))
    })
}

fn peak(blocks: usize, micro_batches: usize) -> u64 {
    let device = Arena::new("device");
    let schedule = Schedule::BreadthFirst { stages_per_device: blocks };
    let builder = Pipeline::builder(deep(blocks)).schedule(schedule).offload(Offload::Host);
    train_deep(builder.micro_batches(MicroBatches::Count(micro_batches)), &device, micro_batches);
    device.peak()
}

/// Runs two steps, with micro-batches of 16 samples.
fn train_deep(builder: Builder, device: &Arena, micro_batches: usize) {
    let device = DeviceSpec::from(device.clone()).threads(1);
    let mut pipe = builder.devices([device]).build().expect("a pipeline");
    let mut optimizer = pipe.optimizer(Adam::new(0.1)).expect("an optimizer");
    let x = numbers(&[16 * micro_batches as i64, 64], 1).to_kind(Kind::Float);
    for _ in 0..2 {
        let step = pipe
            .backward(&x, &x, |out: Tensor, x| Loss::mean((out - x).square().mean(Kind::Float)));
        step.expect("a step");
        optimizer.update();
    }
}

#[test]
fn a_plan_leaves_on_the_device_what_fits_there_and_is_kept() {
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

#[test]
fn automatic_offload_is_what_the_memory_needs() {
    const MICRO_BATCHES: usize = 4;
    let sample = numbers(&[16, 64], 1).to_kind(Kind::Float);
    let loss = |out: &Tensor, x: &Tensor| (out - x).square().mean(Kind::Float);
    let unsampled = |gpu| {
        let offload = Offload::Auto { gpu, host: Some(Bytes(1 << 30)) };
        let builder = Pipeline::builder(deep(12)).offload(offload).reserve(Adam::new(0.1));
        builder.micro_batches(MicroBatches::Count(MICRO_BATCHES))
    };
    let builder = |gpu| unsampled(gpu).sample((&sample, &sample), loss, 16 * MICRO_BATCHES);
    let stages = |memory: Option<u64>, gpu| {
        let arena = match memory {
            Some(memory) => Arena::limited("device", memory).expect("a limit"),
            None => Arena::new("device"),
        };
        train_deep(builder(gpu), &arena, MICRO_BATCHES);
        let device = DeviceSpec::from(arena).threads(1);
        let pipe = builder(gpu).devices([device]).build().expect("a pipeline");
        pipe.offloaded_stages().expect("a number")
    };
    // Weights, gradients and Adam's moments of all blocks take 800 kB.
    assert!((1..12).contains(&stages(Some(600_000), None)), "some, by the device's limit");
    assert!((1..12).contains(&stages(None, Some(Bytes(600_000)))), "some, by the given bytes");
    assert_eq!(stages(Some(1 << 30), None), 0, "none where all fits");
    assert_eq!(stages(None, None), 0, "none without a limit");
    let error = unsampled(None).build().map(drop).expect_err("nothing to measure with");
    assert!(error.to_string().contains("Builder::sample"), "{error}");
    let two = builder(None).devices([DeviceSpec::cpu(), DeviceSpec::cpu()]).replicas(2);
    let error = two.build().map(drop).expect_err("each would plan for itself");
    assert!(error.to_string().contains("Offload::Host"), "{error}");
}

/// A shared table is one tensor: an offloaded stage and a resident one would disagree about its location.
#[test]
fn stages_that_share_a_parameter_live_in_one_place() {
    let on_host = |layers: Layers, each: [Location; STAGES]| {
        let pipe = offloaded(layers, each.into()).build().expect("a pipeline");
        pipe.offloaded_stages().expect("a number")
    };
    let [device, host] = [Location::Device, Location::Host];
    assert_eq!(on_host((GPT.layers)(), [host, device, device, device]), 2, "with the head");
    assert_eq!(on_host((GPT.layers)(), [device, device, device, host]), 2, "with the table");
    assert_eq!(on_host((GPT.layers)(), [device, host, device, device]), 1, "nothing is shared");
    assert_eq!(on_host(mlp(), [host, device, device, device]), 1, "nothing is shared");
}

#[test]
fn neither_more_stages_nor_more_samples_need_more_of_the_device() {
    let least = peak(3, 3);
    for (blocks, micro_batches) in [(12, 3), (3, 24), (24, 24)] {
        let more = peak(blocks, micro_batches);
        let few = least + least / 20;
        assert!(more <= few, "{blocks} × {micro_batches}: {more} bytes, and {least} for 3 × 3");
    }
}

#[test]
fn a_host_without_free_memory_says_so_and_a_wrong_number_of_locations_too() {
    if test_device() != tch::Device::Cpu {
        return;
    }
    let refusal = |bytes: u64, method: Option<Method>| {
        let small = Arena::limited("host", bytes).expect("a limit");
        let builder = offloaded(mlp(), Offload::Host).host(small.clone());
        let builder = method.into_iter().fold(builder, Builder::reserve);
        let error = builder.build().map(drop).expect_err("too little memory");
        assert_eq!(small.peak(), 0, "nothing was allocated before: {error}");
        error.to_string()
    };
    let numbers = mlp().parameter_count().expect("a model");
    let refused = refusal(8 * numbers, None);
    let said = format!("4 offloaded stages need {}", Bytes(16 * numbers));
    assert!(refused.starts_with(&said), "{refused}");
    assert!(refused.contains(&format!("but {} are free:", Bytes(8 * numbers))), "{refused}");
    // Weights and gradients would fit, but not Adam's moments.
    let refused = refusal(20 * numbers, Some(Adam::new(0.1).into()));
    assert!(refused.contains("optimizer with less state"), "{refused}");
    // Two replicas each have weights and gradients.
    let device = || DeviceSpec::cpu().threads(1);
    let small = Arena::limited("host", 31 * numbers).expect("a limit");
    let two = offloaded(mlp(), Offload::Host).devices([device(), device()]).replicas(2).host(small);
    let said = format!("8 offloaded stages need {}", Bytes(32 * numbers));
    assert_fails(two.build().map(drop), &[&said]);
    assert_fails(
        offloaded(mlp(), vec![].into()).build().map(drop),
        &["locations of 0 stages were given"],
    );
}

/// Two stages with a shared table.
fn tied() -> Layers {
    let table = |p: &nn::Path| {
        let table = p.get("table").unwrap_or_else(|| p.randn("table", &[4, 4], 0.0, 0.5));
        nn::func(move |x| x.linear(&table, None::<Tensor>).tanh())
    };
    Layers::new().add("first", table).add_sharing("last", "first", move |_, first| table(first))
}

const TIED: Case = Case {
    name: "tied",
    layers: tied,
    input: |n| numbers(&[n, 4], 1),
    target: |n| numbers(&[n, 4], 2),
    loss: |out: Tensor, y| Loss::mean((out - y).square().mean(Kind::Double)),
    shows_cut: false,
};

/// Offloads both stages, with this list of actions.
fn tied_offloaded(list: &str, updates_in_backward: bool) -> (Pipeline, Optimizer) {
    tch::manual_seed(3);
    let schedule = Schedule::BreadthFirst { stages_per_device: 2 };
    let builder = builder(tied(), 1).schedule(schedule).offload(Offload::Host);
    let builder = builder.update_in_backward(updates_in_backward);
    let mut pipe = between_arenas(builder).build().expect("a pipeline");
    pipe.set_actions(list.parse().expect("a valid list")).expect("taken");
    let optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
    (pipe, optimizer)
}

/// The second stage's weight gradients are added to the first one's.
#[test]
fn updates_in_the_backward_refuse_a_list_that_ends_a_stage_before_what_adds_to_its_gradient() {
    let (x, y) = ((TIED.input)(7), (TIED.target)(7));
    let too_early = "0F0,0F1,1F0,1F1,1I0,1I1,1W1,0B0,0B1,1W0";
    let (mut pipe, _optimizer) = tied_offloaded(too_early, true);
    let plain = Plain::of(&tied(), &pipe);
    let refused = pipe.backward(&x, &y, TIED.loss).map(drop).expect_err("too early").to_string();
    assert!(refused.contains("end stage 0's backward first"), "{refused}");
    assert!(refused.contains("update_in_backward(false)"), "{refused}");
    assert_close(&pipe.variables().expect("variables"), &plain.values(), "refused");
    let (mut pipe, mut optimizer) = tied_offloaded(too_early, false);
    pipe.backward(&x, &y, TIED.loss).expect("a step");
    let _loss = plain.backward(&TIED, &x, &y, MicroBatches::Count(1), None);
    assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), "the same list");
    optimizer.step().expect("an update");

    let in_time = "0F0,0F1,1F0,1F1,1I0,1I1,1W1,1W0,0B0,0B1";
    let (mut in_time, _optimizer) = tied_offloaded(in_time, true);
    in_time.backward(&x, &y, TIED.loss).expect("a step");
    let values = in_time.variables().expect("variables");
    assert_close(&values, &pipe.variables().expect("variables"), "halves before");
}

/// The window's gradients are added to those of the step before it.
#[test]
fn an_update_inside_a_window_is_that_of_the_device() {
    for case in [MLP, GPT] {
        let trained = both(case.layers).map(|mut pipe| {
            let mut optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
            for seed in 0..4 {
                let (x, y) = case.data(7, seed);
                pipe.backward(&x, &y, case.loss).expect("a step");
                pipe.accumulate(&x, &y, case.loss).expect("a part");
                optimizer.step().expect("a step");
                pipe.commit().expect("a window");
                optimizer.update();
            }
            pipe.variables().expect("variables")
        });
        let [device, host] = trained;
        assert_close(&host, &device, case.name);
    }
}

/// An update continues behind `step()`, and writes to tensors that the caller keeps.
#[test]
fn kept_variables_are_the_plain_models_after_wait() {
    let (x, y) = batch();
    let trained = both(mlp).map(|mut pipe| {
        let kept = pipe.variables().expect("variables");
        let mut optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
        let mut seen = Vec::new();
        for _ in 0..6 {
            pipe.backward(&x, &y, MLP.loss).expect("a step");
            optimizer.step().expect("updated");
            optimizer.wait().expect("updated");
            seen.extend(copies(&kept));
            optimizer.zero_grad().expect("cleared");
        }
        assert_same("kept", &kept, &pipe.variables().expect("variables"));
        seen
    });
    let [device, host] = trained;
    assert_close(&host, &device, "kept");
}

/// With an optimizer, the first stage's weights stay on the device between steps, where a change on the host makes
/// them old. Without one, others change them, such as tch's, which change `data()`.
#[test]
fn weights_that_are_set_between_steps_are_those_of_the_next_step() {
    let (x, y) = batch();
    let trained = |optimizes: bool| {
        both(mlp).map(|mut pipe| {
            let kept = pipe.variables().expect("variables");
            let _optimizer = optimizes.then(|| pipe.optimizer(AdamW::new(0.01)));
            for _ in 0..3 {
                pipe.backward(&x, &y, MLP.loss).expect("a step");
                for (_, variable) in &kept {
                    let (gradient, data) = (variable.grad(), variable.data());
                    let mut set = if optimizes { variable.shallow_clone() } else { data };
                    let _set = tch::no_grad(|| set.g_sub_(&(gradient * 0.1)));
                }
                pipe.zero_grad().expect("cleared");
            }
            pipe.variables().expect("variables")
        })
    };
    for optimizes in [false, true] {
        let [device, host] = trained(optimizes);
        assert_close(&host, &device, &format!("set by hand, with an optimizer: {optimizes}"));
    }
}

#[test]
fn an_update_takes_memory_for_the_state_alone_and_takes_it_once() {
    if test_device() != Device::Cpu {
        return;
    }
    const BLOCKS: usize = 4;
    let x = numbers(&[7, 64], 1);
    let block = deep(1).parameter_count().expect("a model") * 8;
    for (in_backward, copies) in [(false, 4), (true, 3)] {
        let host = Arena::new("host");
        let device = DeviceSpec::from(Arena::new("device")).threads(1);
        let builder = offloaded(deep(BLOCKS), Offload::Host).kind(Kind::Double);
        let builder = builder.devices([device]).host(host.clone()).update_in_backward(in_backward);
        let mut pipe = builder.build().expect("a pipeline");
        let mut optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
        let mut step = || {
            let loss = |out: Tensor, x: &Tensor| Loss::mean((out - x).square().mean(Kind::Double));
            pipe.backward(&x, &x, loss).expect("a step");
            optimizer.step().expect("a step");
            optimizer.wait().expect("updated");
            let most = host.current();
            optimizer.zero_grad().expect("cleared");
            most
        };
        // Weights, two moments and, after the step, gradients of all blocks; and the activations between stages.
        let (least, most) = (copies * BLOCKS as u64 * block, (4 * BLOCKS as u64 + 4) * block);
        let seen: Vec<u64> = (0..6).map(|_| step()).collect();
        assert!(
            seen.iter().all(|bytes| (least..=most).contains(bytes)),
            "{least}..{most}: {seen:?}"
        );
        assert!(seen.iter().all(|bytes| *bytes == seen[5]), "{seen:?}");
    }
}

#[test]
fn a_step_that_fails_behind_an_update_says_so_and_others_are_refused_before() {
    let (x, y) = batch();
    let fails = |x: &Tensor| {
        assert!(!brimful::pipeline::is_recomputing(), "no second time");
        x.shallow_clone()
    };
    let build = |updates_in_backward| {
        let layers = Layers::new().add_fn("fails", fails).add_layers("rest", mlp());
        let builder = offloaded(layers, Offload::Host).update_in_backward(updates_in_backward);
        let mut pipe = builder.build().expect("a pipeline");
        let optimizer = pipe.optimizer(Sgd::new(0.1)).expect("an optimizer");
        (pipe, optimizer)
    };
    let (mut pipe, _optimizer) = build(true);
    assert_fails(pipe.accumulate(&x, &y, MLP.loss).map(drop), &["one mini-batch"]);
    let before = pipe.variables().expect("variables");
    let ratio = |out: Tensor, y: &Tensor| {
        Loss::ratio(out.square().sum(Kind::Double), y.ne(-1).sum(Kind::Double))
    };
    let refused = pipe.backward(&x, &y, ratio).map(drop).expect_err("an unknown denominator");
    assert!(refused.to_string().contains("Loss::mean"), "{refused}");
    assert_same("refused", &pipe.variables().expect("variables"), &before);
    let failed = pipe.backward(&x, &y, MLP.loss).map(drop);
    assert_fails(failed, &["updates of 3 stages had begun", "no second time"]);
    let (mut pipe, _optimizer) = build(false);
    let failed = pipe.backward(&x, &y, MLP.loss).map(drop).expect_err("no step").to_string();
    assert!(!failed.contains("had begun"), "{failed}");
}

/// Builds four stages with optimizer in the backward and stateless SGD; returns also their initial values.
fn updating_in_backward(builder: Builder) -> (Pipeline, Optimizer, Named) {
    tch::manual_seed(3);
    let mut pipe = builder.update_in_backward(true).build().expect("a pipeline");
    let optimizer = pipe.optimizer(Sgd::new(0.1)).expect("an optimizer");
    let before = copies(&pipe.variables().expect("variables"));
    (pipe, optimizer, before)
}

fn partly_updated(error: &Error) -> bool {
    matches!(error, Error::Pipeline(PipelineError::PartlyUpdated { .. }))
}

#[test]
fn a_loss_that_is_not_finite_is_refused_before_the_first_update() {
    let mixed = || vec![Location::Host, Location::Host, Location::Host, Location::Device].into();
    for places in [|| Offload::Host, mixed] {
        for row in [0, 3, 6] {
            let (mut pipe, mut optimizer, before) =
                updating_in_backward(offloaded(mlp(), places()));
            let (x, y) = batch();
            let _ = x.get(row).fill_(f64::NAN);
            let refused = pipe.backward(&x, &y, MLP.loss).map(drop).expect_err("no loss");
            assert!(matches!(refused, Error::Loss(LossError::NonFinite { .. })), "{refused}");
            assert_same("refused", &pipe.variables().expect("variables"), &before);
            let (x, y) = batch();
            pipe.backward(&x, &y, MLP.loss).expect("the next step");
            optimizer.update();
        }
    }
}

#[test]
fn no_stage_is_updated_by_a_gradient_that_is_refused() {
    for place in 0..STAGES {
        let layers = (0..STAGES).fold(Layers::new(), |layers, number| match number == place {
            true => layers.add(number.to_string(), odd),
            false => layers.add(number.to_string(), even),
        });
        let builder = offloaded(layers, Offload::Host).non_finite(NonFinitePolicy::RefuseGradients);
        let (mut pipe, _optimizer, before) = updating_in_backward(builder);
        let x = numbers(&[7, 4], 1);
        let loss = |out: Tensor, _: &Tensor| Loss::mean(out.square().mean(Kind::Double));
        let refused = pipe.backward(&x, &x, loss).map(drop).expect_err("no gradient");
        let values = pipe.variables().expect("variables");
        let odd = format!("{place}.");
        for ((name, value), (_, first)) in values.iter().zip(&before) {
            // Backwards begin with the last stage.
            let is_updated = name[..1].parse::<usize>().expect("a number") > place;
            assert_eq!(*value != *first, is_updated, "{name} at {place}");
            assert!(!name.starts_with(&odd) || *value == *first, "{name}");
        }
        let reported = refused.to_string();
        assert_eq!(partly_updated(&refused), place + 1 < STAGES, "{reported}");
        assert_eq!(reported.contains("nothing was changed"), place + 1 == STAGES, "{reported}");
        assert!(reported.contains("a gradient is not finite"), "{reported}");
    }
}

/// On a CPU every allocation can be made to fail: the step leaves nothing, or reports that it left a part. An
/// automatic size would otherwise retry and update twice.
#[test]
fn memory_that_runs_out_behind_an_update_is_reported_and_no_reason_to_try_again() {
    if test_device() != Device::Cpu {
        return;
    }
    let (x, y) = batch();
    let (mut undisturbed, mut optimizer, _) = updating_in_backward(offloaded(mlp(), Offload::Host));
    undisturbed.backward(&x, &y, MLP.loss).expect("a step");
    optimizer.wait().expect("updated");
    let expected = undisturbed.variables().expect("variables");
    for size in [MicroBatches::Count(3), MicroBatches::Largest] {
        let device = Arena::limited("device", 1 << 20).expect("a limit");
        let spec = DeviceSpec::from(device.clone()).threads(1);
        let builder = offloaded(mlp(), Offload::Host).devices([spec]).micro_batches(size);
        let (mut pipe, mut optimizer, before) =
            updating_in_backward(builder.host(Arena::new("host")));
        let (mut reported, mut refused) = (0, 0);
        for n in 1.. {
            pipe.set_variables(copies(&before)).expect("values");
            let refusals = device.refusals();
            device.fail_nth_allocation(n);
            let ran = pipe.backward(&x, &y, MLP.loss).map(drop);
            device.fail_nth_allocation(0);
            optimizer.wait().expect("updated");
            let values = pipe.variables().expect("variables");
            match ran {
                Ok(()) => assert_close(&values, &expected, &format!("{size:?}, allocation {n}")),
                Err(error) if partly_updated(&error) => reported += 1,
                Err(error) => {
                    refused += 1;
                    assert!(error.out_of_memory().is_some(), "{error}");
                    assert_same(&format!("{size:?}, allocation {n}"), &values, &before);
                }
            }
            if device.refusals() == refusals {
                break;
            }
        }
        assert!(reported > 0, "{size:?}: what follows an update allocates");
        assert_eq!(refused > 0, size == MicroBatches::Count(3), "an automatic size tries again");
    }
}

/// Covers the optimizer's state, which is allocated before the first update, and boundaries.
#[test]
fn a_step_that_runs_out_of_host_memory_between_updates_says_so() {
    if test_device() != Device::Cpu {
        return;
    }
    let (x, y) = batch();
    let host = Arena::new("host");
    let builder = between_arenas(offloaded(mlp(), Offload::Host)).host(host.clone());
    let (mut pipe, _sgd, before) = updating_in_backward(builder);
    for n in 1.. {
        pipe.set_variables(copies(&before)).expect("values");
        let mut optimizer = pipe.optimizer(AdamW::new(0.1)).expect("a new optimizer");
        let refusals = host.refusals();
        host.fail_nth_allocation(n);
        let ran = pipe.backward(&x, &y, MLP.loss).map(drop);
        host.fail_nth_allocation(0);
        optimizer.wait().expect("nothing waits");
        if ran.is_err_and(|error| !partly_updated(&error)) {
            assert_same("undone", &pipe.variables().expect("variables"), &before);
        }
        if host.refusals() == refusals {
            break;
        }
    }
}

#[test]
fn updates_in_the_backward_of_several_devices_or_replicas_are_refused() {
    let device = || DeviceSpec::cpu().threads(1);
    let two = || offloaded(mlp(), Offload::Host).devices([device(), device()]);
    let schedule = Schedule::BreadthFirst { stages_per_device: 2 };
    for builder in [two().replicas(2), two().schedule(schedule)] {
        let refused = builder.update_in_backward(true).build().map(drop);
        assert_fails(refused, &["one pipeline on one device"]);
    }
}

/// The norm would cover only the stages on the device.
#[test]
fn what_was_updated_already_cannot_be_clipped() {
    let mixed = vec![Location::Host, Location::Host, Location::Host, Location::Device];
    let (mut pipe, mut optimizer, _) = updating_in_backward(offloaded(mlp(), mixed.into()));
    let (x, y) = batch();
    pipe.backward(&x, &y, MLP.loss).expect("a step");
    let refused = optimizer.clip_gradient_norm(0.1);
    assert_fails(refused, &["4 stages", "update_in_backward(false)"]);
}

/// Three offloaded linear layers and two device buffers.
fn three_offloaded() -> Builder {
    let layers = (0..3).fold(Layers::new(), |layers, at| layers.add(at.to_string(), even));
    let schedule = Schedule::BreadthFirst { stages_per_device: 3 };
    builder(layers, 1).schedule(schedule).offload(Offload::Host)
}

#[test]
fn actions_whose_graphs_would_outlive_their_weights_are_refused() {
    tch::manual_seed(3);
    let mut pipe = three_offloaded().build().expect("a pipeline");
    let list = "0F0,1F0,2F0,0F1,1F1,2F1,2B0,1B0,0B0,2B1,1B1,0B1";
    let refused = pipe.set_actions(list.parse().expect("a valid list"));
    assert_fails(refused, &["2B0", "has 2 buffers", "2R0"]);
    let halves = "0F0,1F0,2F0,2R0,2I0,1R0,1I0,0R0,0I0,2W0,1W0,0W0";
    assert_fails(
        pipe.set_actions(halves.parse().expect("a valid list")),
        &["2W0", "has 2 buffers"],
    );
    // With activation recomputation, and with split backwards that no other action separates.
    let list = "0F0,1F0,2F0,0F1,1F1,2F1,2R0,2I0,2W0,1R0,1B0,0R0,0B0,2R1,2B1,1R1,1B1,0R1,0B1";
    pipe.set_actions(list.parse().expect("a valid list")).expect("taken");
    let x = numbers(&[4, 4], 1);
    let mean = |out: Tensor| Loss::mean(out.square().mean(Kind::Double));
    pipe.backward(&x, &x, move |out: Tensor, _: &Tensor| mean(out)).expect("a step");
    let mut plain = three_offloaded().offload(Offload::Device).build().expect("a pipeline");
    plain.set_variables(pipe.variables().expect("variables")).expect("the same values");
    plain.backward(&x, &x, move |out: Tensor, _: &Tensor| mean(out)).expect("a step");
    let gradients = plain.gradients().expect("gradients");
    assert_close(&pipe.gradients().expect("gradients"), &gradients, "computed again");
}

/// Returns the timelines of three steps with an optimizer and timed transfers.
fn timed(case: &Case) -> [Timeline; 3] {
    let builder = offloaded((case.layers)(), Offload::Host);
    let mut pipe = between_arenas(builder).build().expect("a pipeline");
    let mut optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
    let (x, y) = ((case.input)(7), (case.target)(7));
    pipe.trace_transfers(true);
    [(); 3].map(|()| {
        let step = pipe.backward(&x, &y, case.loss).expect("a step");
        optimizer.update();
        step.timeline.expect("a pipeline's")
    })
}

/// Returns the schedule's transfers in this step. The mini-batch itself never leaves a CPU's memory, and the first
/// stage's weights are in a buffer since the step before.
fn planned(timeline: &Timeline, step: usize) -> Vec<Transfer> {
    let location = StageLocation { boundaries: Location::Host, ..StageLocation::HOST };
    let transfers = Transfers::new(&timeline.actions, &[location; STAGES], 2).expect("moves");
    let stays = |one: &Transfer| {
        test_device() == Device::Cpu && one.stage == StageId(0) && one.micro_batch.is_some()
    };
    let left = |one: &Transfer| step > 0 && one.kind == TransferKind::Fetch && one.before == 0;
    let left = |one: &Transfer| left(one) && one.stage == StageId(0);
    transfers.of(0).iter().copied().filter(|one| !stays(one) && !left(one)).collect()
}

fn host_link(timeline: &Timeline) -> &HostLinkUse {
    let [host_link] = &timeline.host_links[..] else {
        panic!("one device, but {:?}", timeline.host_links)
    };
    host_link
}

fn sorted_stages(
    stages: impl Iterator<Item = (TransferKind, StageId)>,
) -> impl Iterator<Item = (TransferKind, StageId)> {
    let mut stages: Vec<_> = stages.collect();
    stages.sort();
    stages.into_iter()
}

/// Sorts transfers in the order of the list, whatever their times.
fn sorted(transfers: impl Iterator<Item = Transfer>) -> Vec<Transfer> {
    let mut transfers: Vec<Transfer> = transfers.collect();
    transfers.sort_by_key(|one| (one.before, one.kind, one.stage, one.micro_batch));
    transfers
}

#[test]
fn every_transfer_of_a_step_is_timed_once_and_in_its_order() {
    for (step, timeline) in timed(&MLP).into_iter().enumerate() {
        let reported = || host_link(&timeline).transfers.iter().map(|span| span.transfer);
        let is_state = |one: &Transfer| {
            [TransferKind::FetchState, TransferKind::OffloadState].contains(&one.kind)
        };
        let (states, others): (Vec<_>, Vec<_>) = reported().partition(is_state);
        assert_eq!(sorted(others.into_iter()), sorted(planned(&timeline, step).into_iter()));
        let mut states: Vec<_> = states.into_iter().map(|one| (one.kind, one.stage)).collect();
        states.sort();
        // The first update waits for the second step. Each step fetches the next one's first states ahead.
        let stages = |kind| (0..STAGES).map(move |j| (kind, StageId::at(j)));
        let updated = stages(TransferKind::OffloadState).filter(|_| step > 0);
        let ahead = stages(TransferKind::FetchState).take(2);
        let fetched = stages(TransferKind::FetchState).filter(|_| step > 0);
        assert!(states.into_iter().eq(updated.chain(sorted_stages(ahead.chain(fetched)))));
        let mut ways = [TransferKind::is_inward, TransferKind::is_outward].map(|is_this_way| {
            host_link(&timeline)
                .transfers
                .iter()
                .filter(move |span| is_this_way(span.transfer.kind))
        });
        for way in &mut ways {
            let way: Vec<&TransferSpan> = way.collect();
            assert!(way.iter().all(|span| span.start <= span.end && span.bytes > 0), "{way:?}");
            assert!(way.windows(2).all(|pair| pair[0].end <= pair[1].start), "{way:?}");
        }
        let location = host_link(&timeline)
            .transfers
            .iter()
            .filter(|s| s.transfer.kind == TransferKind::OffloadGradients);
        let numbers = mlp().parameter_count().expect("a model");
        assert_eq!(location.map(|span| span.bytes).sum::<u64>(), 8 * numbers);
    }
    // Later steps may find a late update; on a CPU the first step starts its transfers in the listed order.
    if test_device() == Device::Cpu {
        let [first, ..] = timed(&MLP);
        assert!(host_link(&first).transfers.is_sorted_by_key(|span| span.transfer.before));
    }
}

#[test]
fn what_skips_bring_crosses_as_what_it_is_a_part_of() {
    for (step, timeline) in timed(&U_NET).into_iter().enumerate() {
        let name = |one: Transfer| (one.kind, one.stage, one.micro_batch);
        let reported: BTreeSet<_> =
            host_link(&timeline).transfers.iter().map(|span| name(span.transfer)).collect();
        let mut expected: BTreeSet<_> = planned(&timeline, step).into_iter().map(name).collect();
        expected.extend(reported.iter().filter(|(kind, ..)| {
            [TransferKind::FetchState, TransferKind::OffloadState].contains(kind)
        }));
        assert_eq!(reported, expected);
    }
}

/// Returns the end of the last such transfer that was started before this action.
fn end(
    host_link: &HostLinkUse,
    before: usize,
    wanted: (TransferKind, StageId, Option<MicroBatchId>),
) -> f64 {
    let is_it = |span: &&TransferSpan| {
        let Transfer { kind, stage, micro_batch, .. } = span.transfer;
        (kind, stage, micro_batch) == wanted && span.transfer.before <= before
    };
    host_link.transfers.iter().filter(is_it).map(|span| span.end).fold(0.0, f64::max)
}

#[test]
fn no_transfer_begins_before_what_it_needs_and_no_action_before_its_transfers() {
    // An accelerator's event times are rounded.
    let slack = if test_device() == Device::Cpu { 0.0 } else { 1e-5 };
    for (step, timeline) in timed(&MLP).into_iter().enumerate() {
        let (spans, host_link) = (&timeline.spans[0], host_link(&timeline));
        for (at, span) in spans.iter().enumerate() {
            let Action { kind, stage, micro_batch } = span.action;
            let i = Some(micro_batch);
            let mut needed = vec![(TransferKind::Fetch, stage, None)];
            match kind {
                ActionKind::Forward | ActionKind::Recompute => {
                    needed.push((TransferKind::BoundaryIn, stage, i));
                }
                _ => needed.push((TransferKind::GradientIn, StageId(stage.0 + 1), i)),
            }
            for one in needed {
                assert!(end(host_link, at, one) <= span.start + slack, "{}: {one:?}", span.action);
            }
        }
        let mut in_buffers = i32::from(step > 0);
        for span in &host_link.transfers {
            let Transfer { kind, stage, micro_batch, before } = span.transfer;
            let came_from = match kind {
                TransferKind::BoundaryIn => {
                    end(host_link, before, (TransferKind::BoundaryOut, stage, micro_batch))
                }
                TransferKind::GradientIn => {
                    end(host_link, before, (TransferKind::GradientOut, stage, micro_batch))
                }
                TransferKind::OffloadGradients => {
                    let of_stage = spans.iter().filter(|span| span.action.stage == stage);
                    of_stage.map(|span| span.end).fold(0.0, f64::max)
                }
                _ => 0.0,
            };
            assert!(came_from <= span.start + slack, "{}", span.transfer);
            in_buffers +=
                i32::from(kind == TransferKind::Fetch) - i32::from(kind == TransferKind::Release);
            assert!((0..=2).contains(&in_buffers), "{}", span.transfer);
        }
    }
}

#[test]
fn compute_waits_between_its_actions_and_says_for_what() {
    for timeline in timed(&MLP) {
        let (spans, waits) = (&timeline.spans[0], &host_link(&timeline).waits);
        for wait in waits {
            assert!(wait.start < wait.end, "{wait:?}");
            let works = spans.iter().any(|span| span.start < wait.end && wait.start < span.end);
            assert!(!works || test_device() != Device::Cpu, "{wait:?} amid {spans:?}");
        }
        // A CPU copies synchronously, so its compute waits for every transfer.
        if test_device() == Device::Cpu {
            for awaited in [Awaited::Weights, Awaited::Boundaries, Awaited::GradientMemory] {
                assert!(waits.iter().any(|wait| wait.awaited == awaited), "{awaited:?}: {waits:?}");
            }
        }
        let trace = timeline.trace();
        assert!(trace.contains("host link to device 0") && trace.contains("fetch 1"), "{trace}");
        assert!(trace.contains("waits for weights") || test_device() != Device::Cpu, "{trace}");
    }
}

#[test]
fn nothing_is_timed_unless_somebody_asks() {
    let (x, y) = batch();
    let [mut device, mut host] = both(mlp);
    let host_links = |pipe: &mut Pipeline| {
        let step = pipe.backward(&x, &y, MLP.loss).expect("a step");
        step.timeline.expect("a pipeline's").host_links.len()
    };
    assert_eq!(host_links(&mut host), 0, "nobody asked");
    host.trace_transfers(true);
    assert_eq!(host_links(&mut host), 1);
    host.trace_transfers(false);
    assert_eq!(host_links(&mut host), 0, "nobody asks any more");
    device.trace_transfers(true);
    assert_eq!(host_links(&mut device), 0, "nothing moves");
}
