//! Features of a pipeline besides its steps: losses on the whole output, several tensors, frozen layers,
//! clipping, saving, evaluation, random numbers, reports; and its errors.

use std::collections::BTreeSet;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex};

use crate::support::pipeline_cases::{
    CASES, CNN, GPT, INTERLEAVED, MLP, Plain, U_NET, builder, built, eval, mlp, piped,
};
use crate::support::{
    Named, Update, assert_all_close, assert_close, assert_fails, assert_same, copies, test_device,
};
use brimful::batch::BatchError;
use brimful::memory::Arena;
use brimful::optim::OptimError;
use brimful::optim::{Adam, Ema, Method, Optimizer, Sgd};
use brimful::pipeline::{BalanceBy, Builder, Offload, PipelineError};
use brimful::save::{self, Metadata};
use brimful::schedule::{Costs, Recompute, Schedule, simulate};
use brimful::{
    Batch, DeviceSpec, Error, Layers, Loss, MicroBatches, NonFinitePolicy, Pipeline, StepError,
    is_recomputing,
};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn mse(out: Tensor, y: &Tensor) -> Loss {
    Loss::mean(out.mse_loss(y, tch::Reduction::Mean))
}

/// If the tested device is not a CPU, every boundary and skip crosses devices here.
#[test]
fn a_mix_of_devices() {
    for (case, recompute) in
        [&MLP, &CNN, &U_NET].into_iter().flat_map(|case| Recompute::ALL.map(|r| (case, r)))
    {
        let what = format!("{}, {recompute}, a mix", case.name);
        let devices = [test_device(), Device::Cpu, test_device(), Device::Cpu];
        let devices = devices.map(|device| DeviceSpec::from(device).threads(1));
        let size = MicroBatches::Count(4);
        let builder = builder((case.layers)(), 0).devices(devices).recompute(recompute);
        let mut pipe = built(builder.micro_batches(size), &what);
        let mut plain = Plain::of(&(case.layers)(), &pipe);
        let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
        for number in 0..3 {
            let (x, y) = case.data(9, number);
            let step = pipe.backward(&x, &y, case.loss).expect(&what);
            let expected = plain.backward(case, &x, &y, size, step.seed);
            assert!((step.loss - expected).abs() < 1e-10, "{what}: {} not {expected}", step.loss);
            assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), &what);
            optimizer.update();
            plain.optimizer.update();
            assert_close(&pipe.variables().expect("variables"), &plain.values(), &what);
        }
        let (x, _) = case.data(9, 3);
        let out = eval(&mut pipe, &x, MicroBatches::Count(5)).expect("an evaluation");
        assert_all_close(&out, &plain.answer(&x), &what);
    }
}

#[test]
fn what_a_step_could_not_give_back_is_refused() {
    let mut pipe = piped(mlp(), 2, 2);
    let x = Tensor::ones([4, 4], DOUBLE).set_requires_grad(true);
    let refused = PipelineError::InputGradient { leaf: 0 };
    assert_eq!(pipe.backward(&x, &x, mse).expect_err("traced"), refused.clone().into());
    assert_eq!(pipe.forward(&(&x * 2.0)).expect_err("traced"), refused.into());
    let _out =
        eval(&mut pipe, &x, MicroBatches::Count(1)).expect("without gradients nothing is lost");
    pipe.set_micro_batches(MicroBatches::Auto);
    let error = pipe.forward(&x.detach()).expect_err("it cannot be tried again");
    assert_eq!(error, PipelineError::AutomaticForward.into());
}

#[test]
fn what_has_no_place_in_a_window_is_refused() {
    tch::manual_seed(24);
    let mut pipe = piped(mlp(), 3, 2);
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

/// A failing loss fails the step.
#[test]
fn a_loss_on_all_outputs_that_fails_leaves_nothing() {
    let mut pipe = piped(mlp(), 2, 2);
    let x = (MLP.input)(6);
    let sum = |out: &brimful::pipeline::Outputs| out.sum(Kind::Double);
    pipe.backward_whole(&x, sum).expect("a step");
    let before = pipe.gradients().expect("gradients");
    let failures: [fn(&Tensor) -> Tensor; 3] = [
        |out| out.sum(Kind::Double) / 0.0,
        |out| out.shallow_clone(),
        |out| out.detach().sum(Kind::Double),
    ];
    for (number, failure) in failures.into_iter().enumerate() {
        let error = pipe.backward_whole(&x, |out| failure(out)).expect_err("it fails").to_string();
        assert!(!error.contains("frame #"), "no backtrace in a message: {error}");
        let what = format!("failure {number}");
        assert_close(&pipe.gradients().expect("gradients"), &before, &what);
    }
    // The loss runs on the caller's thread, so its panic is the caller's: libtorch's and its own.
    let panics: [fn(&Tensor) -> Tensor; 2] = [|out| out.narrow(1, 0, 99), |_| panic!("no loss")];
    for (number, give_up) in panics.into_iter().enumerate() {
        let step = AssertUnwindSafe(|| pipe.backward_whole(&x, |out| give_up(out)).map(drop));
        let words = panic::catch_unwind(step).expect_err("it panics");
        if number == 1 {
            assert_eq!(words.downcast_ref(), Some(&"no loss"), "in its own words");
        }
        let what = format!("panic {number}");
        assert_close(&pipe.gradients().expect("gradients"), &before, &what);
    }
    pipe.zero_grad().expect("cleared");
    pipe.backward_whole(&x, sum).expect("the next step");
    assert_close(&pipe.gradients().expect("gradients"), &before, "the next step");
}

#[test]
fn outputs_without_a_gradient_or_of_an_earlier_forward_are_refused() {
    let mut pipe = piped(mlp(), 2, 2);
    let x = Tensor::ones([4, 4], DOUBLE);
    let out = pipe.forward(&x).expect("a forward");
    let error = pipe.backward_from(out).expect_err("no gradient");
    assert_eq!(error, PipelineError::NoOutputGradient.into());
    let old = pipe.forward(&x).expect("a forward");
    let new = pipe.forward(&x).expect("another");
    old.sum(Kind::Double).backward();
    assert_eq!(pipe.backward_from(old).expect_err("old"), PipelineError::OldOutputs.into());
    new.sum(Kind::Double).backward();
    pipe.backward_from(new).expect("the last one");
    // The next step drops a forward whose backward never comes.
    let _unused = pipe.forward(&x).expect("a forward");
    pipe.zero_grad().expect("cleared");
    pipe.backward(&x, &x, |out: Tensor, _| Loss::mean(out.sum(Kind::Double))).expect("a step");
}

#[derive(Batch)]
struct Pair {
    left: Tensor,
    right: Tensor,
    #[batch(shared)]
    scale: Tensor,
}

/// Two inputs and a shared one, all also needed by a middle stage; two outputs, one of integers.
fn many() -> Layers {
    Layers::new()
        .stash("inputs")
        .add_many("mix", |p| {
            let fc = nn::linear(p, 3, 3, Default::default());
            move |x, _| vec![x[0].apply(&fc) * &x[2], x[1].shallow_clone()]
        })
        .add_many("swap", |_| |x, _| vec![x[1].shallow_clone(), x[0].tanh()])
        .pop_many("again", "inputs", |x, inputs| vec![&x[0] + &inputs[0], x[1].shallow_clone()])
        .add_many("out", |p| {
            let fc = nn::linear(p, 3, 2, Default::default());
            move |x, _| {
                let out = (&x[0] * &x[1]).apply(&fc);
                vec![out.argmax(1, false), out]
            }
        })
}

/// Returns the error itself, without its location.
fn of_closure(error: Error) -> Error {
    match error {
        Error::Stage { cause, .. } => *cause,
        error => error,
    }
}

#[test]
fn several_tensors_flow_through_stages() {
    tch::manual_seed(2);
    let batch = Pair {
        left: Tensor::randn([7, 3], DOUBLE),
        right: Tensor::randn([7, 3], DOUBLE),
        scale: Tensor::randn([3], DOUBLE),
    };
    let target = (Tensor::randn([7, 2], DOUBLE), 3.0);
    let loss = |out: &Tensor, y: &Tensor, weight: f64| {
        Loss::mean(out.mse_loss(y, tch::Reduction::Mean)) * weight
    };
    for recompute in Recompute::ALL {
        for stages in 1..=5 {
            let what = format!("{stages} stages, {recompute}");
            let mut pipe = builder(many(), stages)
                .micro_batches(MicroBatches::Count(3))
                .recompute(recompute)
                .build()
                .expect("a pipeline");
            let plain = Plain::of(&many(), &pipe);
            let step = pipe.backward(&batch, &target, move |out: Vec<Tensor>, (y, weight)| {
                (loss(&out[1], y, *weight), out[0].shallow_clone())
            });
            let step = step.unwrap_or_else(|error| panic!("{what}: {error}"));
            let here = |t: &Tensor| t.to_device(test_device());
            let inputs = [&batch.left, &batch.right, &batch.scale].map(here);
            let out = plain.model.forward_many(&inputs, true);
            (out[1].mse_loss(&here(&target.0), tch::Reduction::Mean) * target.1).backward();
            assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), &what);
            assert_eq!(step.outputs, out[0], "{what}");
            pipe.set_micro_batches(MicroBatches::Samples(2));
            let evaluated = pipe.map(&batch, |out: Vec<Tensor>| out).expect("an evaluation");
            assert_eq!(evaluated[0], out[0], "{what}");
            pipe.set_micro_batches(MicroBatches::Count(2));
            let evaluated =
                pipe.evaluate(&batch, &target, move |[classes, out]: [Tensor; 2], (y, weight)| {
                    (loss(&out, y, *weight), classes)
                });
            let evaluated = evaluated.expect("an evaluation");
            assert_eq!(evaluated.outputs, out[0], "{what}");
            assert!((evaluated.loss - step.loss).abs() < 1e-12, "{what}");
        }
    }
    let mut pipe = builder(many(), 2).build().expect("a pipeline");
    let error = eval(&mut pipe, &batch, MicroBatches::Count(1)).expect_err("two outputs");
    assert_eq!(of_closure(error), PipelineError::OutputCount { given: 2, taken: 1 }.into());
    let (classes, out) = pipe.map(&batch, |out: (Tensor, Tensor)| out).expect("two outputs");
    assert_eq!((classes.size(), out.size()), (vec![7], vec![7, 2]));
    let error = pipe.map(&batch, |(a, _, _): (Tensor, Tensor, Tensor)| a).expect_err("not three");
    assert_eq!(of_closure(error), PipelineError::OutputCount { given: 2, taken: 3 }.into());
}

#[test]
fn layers_can_tell_a_recompute() {
    static SEEN: Mutex<Vec<(usize, bool)>> = Mutex::new(Vec::new());
    let seen = |stage: usize| {
        move |x: &Tensor| {
            SEEN.lock().expect("whole").push((stage, is_recomputing()));
            x.shallow_clone()
        }
    };
    let layers = Layers::new()
        .add("fc", |p| nn::linear(p, 2, 2, Default::default()))
        .add_fn("first", seen(0))
        .add_fn("second", seen(1));
    let x = Tensor::ones([2, 2], DOUBLE);
    // Runs of both stages for each mode: (stage, recomputed) for two micro-batches.
    let expected: [(Recompute, &[(usize, bool)]); 3] = [
        (Recompute::Never, &[(0, false), (0, false), (1, false), (1, false)]),
        (Recompute::ExceptLast, &[(0, false), (0, false), (0, true), (1, false), (1, false)]),
        (
            Recompute::Always,
            &[(0, false), (0, false), (0, true), (0, true), (1, false), (1, false)],
        ),
    ];
    for (recompute, expected) in expected {
        let mut pipe = builder(layers.clone(), 2)
            .balance([2, 1])
            .schedule(Schedule::GPipe)
            .recompute(recompute)
            .micro_batches(MicroBatches::Count(2))
            .build()
            .expect("a pipeline");
        SEEN.lock().expect("whole").clear();
        pipe.backward(&x, &x, mse).expect("a step");
        let mut seen = SEEN.lock().expect("whole").clone();
        seen.sort_unstable();
        assert_eq!(seen, expected, "{recompute}");
        SEEN.lock().expect("whole").clear();
        let _ = eval(&mut pipe, &x, MicroBatches::Count(2)).expect("an evaluation");
        assert!(SEEN.lock().expect("whole").iter().all(|(_, again)| !again));
    }
}

#[test]
fn what_replaces_or_thaws_a_shared_variable_counts_for_its_copies() {
    tch::manual_seed(6);
    let mut pipe = piped((GPT.layers)(), 3, 2);
    let plain = Plain::of(&(GPT.layers)(), &pipe);
    let close = |pipe: &mut Pipeline, what: &str| {
        let x = (GPT.input)(5);
        let out = eval(pipe, &x, MicroBatches::Count(2)).expect("an evaluation");
        assert_all_close(&out, &plain.answer(&x), what);
    };
    // Replaces the value by another.
    let table = |values: Named| {
        let found = values.into_iter().find(|(name, _)| name == "wte.weight");
        found.expect("the shared one").1
    };
    let average = table(plain.values()).detach() * 0.9;
    for mut table in [table(pipe.variables().expect("variables")), table(plain.values())] {
        tch::no_grad(|| table.set_data(&average));
    }
    close(&mut pipe, "put in its place");
    // Freezes and unfreezes it.
    let (x, y) = ((GPT.input)(6), (GPT.target)(6));
    pipe.freeze(|name| name == "wte.weight").expect("frozen");
    let _itself = table(pipe.variables().expect("variables")).set_requires_grad(true);
    let step = pipe.backward(&x, &y, GPT.loss).expect("a step");
    plain.backward(&GPT, &x, &y, MicroBatches::Count(2), step.seed);
    assert_close(&pipe.gradients().expect("gradients"), &plain.gradients(), "trained again");
}

#[test]
fn a_saved_model_loads_into_any_balance_and_the_plain_model() {
    tch::manual_seed(5);
    let folder = tempfile::tempdir().expect("a folder");
    let [model, state] =
        ["model.safetensors", "state.safetensors"].map(|name| folder.path().join(name));
    for case in &CASES {
        let train = |pipe: &mut Pipeline, number| {
            let (x, y) = case.data(6, number);
            pipe.backward(&x, &y, case.loss).expect("a step")
        };
        let build = |devices| piped((case.layers)(), devices, 3);
        let mut first = build(3);
        let mut optimizer = first.optimizer(Adam::new(0.01)).expect("an optimizer");
        train(&mut first, 0);
        optimizer.update();
        first.save(&model).expect("saved");
        optimizer.save(&state).expect("saved");

        let mut second = build(2);
        let mut other = second.optimizer(Adam::new(0.5)).expect("an optimizer");
        second.load(&model).expect("loaded");
        other.load(&state).expect("loaded");
        assert_eq!(other.learning_rate(), 0.01);
        let mut plain = Plain::of(&(case.layers)(), &build(1));
        plain.store.load(&model).expect("loaded");
        plain.optimizer.load(&state).expect("loaded");

        let step = train(&mut first, 1);
        optimizer.step().expect("a step");
        train(&mut second, 1);
        other.step().expect("a step");
        let values = first.variables().expect("variables");
        assert_close(&second.variables().expect("variables"), &values, case.name);
        let (x, y) = case.data(6, 1);
        plain.backward(case, &x, &y, MicroBatches::Count(3), step.seed);
        plain.optimizer.step().expect("a step");
        assert_close(&first.variables().expect("variables"), &plain.values(), case.name);
    }
}

#[test]
fn what_does_not_fit_is_not_loaded() {
    let mut pipe = builder(mlp(), 2).build().expect("a pipeline");
    let before = copies(&pipe.variables().expect("variables"));
    let other = builder((U_NET.layers)(), 1).build().expect("a pipeline");
    let error = pipe.set_variables(other.variables().expect("variables")).expect_err("others");
    let reported = error.to_string();
    let first = "'fc1.bias' is missing in the file, but of shape";
    assert!(
        reported.starts_with(first) && reported.contains("'fc2.weight' is missing"),
        "{reported}"
    );
    assert_close(&pipe.variables().expect("variables"), &before, "as before");
    let unknown = before.iter().map(|(name, value)| (name.clone(), value + 1.0));
    let unknown = unknown.chain([("fc9.bias".to_owned(), Tensor::ones([2], DOUBLE))]);
    let error = pipe.set_variables(unknown.collect()).expect_err("one more");
    let reported =
        "'fc9.bias' is of shape [2] in the file, but missing in the model: load what was";
    assert!(error.to_string().starts_with(reported), "{error}");
    assert_close(&pipe.variables().expect("variables"), &before, "as before");

    let mut optimizer = pipe.optimizer(Adam::new(0.1)).expect("an optimizer");
    let store = nn::VarStore::new(Device::Cpu);
    (U_NET.layers)().build(&store.root()).expect("built");
    let (tensors, metadata) =
        Optimizer::new(&store, Adam::new(0.2)).expect("one").state().expect("a state");
    let error = optimizer.load_state(&tensors, &metadata).expect_err("others");
    assert!(matches!(error, Error::Optim(OptimError::StateMismatch { .. })), "{error}");
    assert_eq!(optimizer.learning_rate(), 0.1);
}

/// Pipeline of two workers with a memory each.
fn between(arenas: &[Arena; 2]) -> Pipeline {
    let devices = arenas.each_ref().map(|arena| DeviceSpec::from(arena.clone()).threads(1));
    let builder = Pipeline::builder(mlp()).devices(devices).kind(Kind::Double);
    builder.micro_batches(MicroBatches::Count(2)).build().expect("a pipeline")
}

/// Checks that a state is loaded by both workers or by none. When one worker's memory runs out, a worker that has
/// already loaded has no memory to restore its old values.
fn loaded_by_all_or_none<T>(
    [first, second]: &[Arena; 2],
    part: &mut T,
    (before, saved): (&Named, &Named),
    state: impl Fn(&T) -> Named,
    load: impl Fn(&mut T, &Named) -> brimful::Result<()>,
) {
    let asked = first.allocations();
    load(part, before).expect("loaded");
    let needed = first.allocations() - asked;
    assert!(needed > 0, "read into memory of its own");
    for n in 1..=needed + 1 {
        first.fail_from_nth_allocation(n);
        second.fail_from_nth_allocation(1);
        let failed = load(part, saved);
        [first, second].iter().for_each(|arena| arena.fail_nth_allocation(0));
        assert!(failed.expect_err("no memory").out_of_memory().is_some());
        assert_same("as before", &state(part), before);
    }
    load(part, saved).expect("loaded");
    assert_same("loaded", &state(part), saved);
}

#[test]
fn a_state_that_one_worker_has_no_memory_for_is_loaded_by_none() {
    let arenas = ["first", "second"].map(Arena::new);
    let mut pipe = between(&arenas);
    let mut optimizer = pipe.optimizer(Adam::new(0.1)).expect("an optimizer");
    let (x, y) = MLP.data(6, 0);
    let mut train = || {
        pipe.backward(&x, &y, MLP.loss).expect("a step");
        optimizer.update();
        let (tensors, texts) = optimizer.state().expect("a state");
        (copies(&tensors), texts)
    };
    let ((saved, texts), (before, _)) = (train(), train());
    let state = |optimizer: &Optimizer| optimizer.state().expect("a state").0;
    let load = |optimizer: &mut Optimizer, all: &Named| optimizer.load_state(all, &texts);
    loaded_by_all_or_none(&arenas, &mut optimizer, (&before, &saved), state, load);
}

#[test]
fn averages_that_one_worker_has_no_memory_for_are_loaded_by_none() {
    let arenas = ["first", "second"].map(Arena::new);
    let mut pipe = between(&arenas);
    let mut ema = pipe.ema(0.5).expect("averages");
    let (tensors, texts) = ema.state().expect("a state");
    let before = copies(&tensors);
    let saved: Named = tensors.iter().map(|(name, t)| (name.clone(), t + 1.0)).collect();
    let state = |ema: &Ema| ema.state().expect("a state").0;
    let load = |ema: &mut Ema, all: &Named| ema.load_state(all, &texts);
    loaded_by_all_or_none(&arenas, &mut ema, (&before, &saved), state, load);
}

#[test]
fn a_pipeline_and_a_store_pass_over_what_is_saved_beside_the_model() {
    let mut pipe = builder(mlp(), 2).build().expect("a pipeline");
    let mut values = pipe.variables().expect("variables");
    for (_, value) in &mut values {
        *value = value.detach() + 1.0;
    }
    let expected = copies(&values);
    for beside in ["optimizer.fc1.bias.exp_avg", "ema.fc1.bias", "bn1.num_batches_tracked"] {
        values.push((beside.to_owned(), Tensor::ones([3], DOUBLE)));
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("beside.safetensors");
    save::write(&file, &values, &Metadata::new()).expect("written");
    pipe.load(&file).expect("loaded");
    assert_close(&pipe.variables().expect("variables"), &expected, "pipeline");
    let mut plain = Plain::of(&mlp(), &builder(mlp(), 1).build().expect("a pipeline"));
    plain.store.load(&file).expect("loaded");
    assert_close(&plain.values(), &expected, "store");
}

#[test]
fn clipping_groups_and_rates_are_those_of_one_optimizer() {
    tch::manual_seed(8);
    // With this many stages, some have no parameter.
    let mut pipe = piped((GPT.layers)(), 8, 2);
    let mut plain = Plain::of(&(GPT.layers)(), &pipe);
    let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
    let bias = |name: &str| name.ends_with("bias");
    optimizer.group("biases", bias, Sgd::new(0.1)).expect("a group");
    plain.optimizer.group("biases", bias, Sgd::new(0.1)).expect("a group");
    for rate in [0.02, 0.005] {
        optimizer.set_learning_rate(rate).expect("a rate");
        plain.optimizer.set_learning_rate(rate).expect("a rate");
        optimizer.set_group_learning_rate("biases", 2.0 * rate).expect("a rate");
        plain.optimizer.set_group_learning_rate("biases", 2.0 * rate).expect("a rate");
        let (x, y) = ((GPT.input)(5), (GPT.target)(5));
        let step = pipe.backward(&x, &y, GPT.loss).expect("a step");
        plain.backward(&GPT, &x, &y, MicroBatches::Count(2), step.seed);
        let norm = optimizer.clip_gradient_norm(0.05).expect("clipped");
        let expected = plain.optimizer.clip_gradient_norm(0.05).expect("clipped");
        assert!(
            (norm.value().expect("a number") - expected.value().expect("a number")).abs() < 1e-10
        );
        optimizer.update();
        plain.optimizer.update();
        assert_close(&pipe.variables().expect("variables"), &plain.values(), "groups");
    }
    optimizer.set_group_learning_rate("default", 0.003).expect("a rate");
    plain.optimizer.set_group_learning_rate("default", 0.003).expect("a rate");
    assert_eq!((optimizer.learning_rate(), plain.optimizer.learning_rate()), (0.003, 0.003));
    assert!(optimizer.set_group_learning_rate("default", -1.0).is_err());
    assert_eq!(optimizer.learning_rate(), 0.003);
    let error = optimizer.set_group_learning_rate("no", 0.1).expect_err("no group");
    assert!(matches!(error, Error::Optim(OptimError::NoGroup { .. })), "{error}");
    let error = optimizer.clip_gradient_norm(1.0).expect_err("no gradient");
    assert!(matches!(error, Error::Optim(OptimError::NoGradient { .. })), "{error}");
    let error = optimizer.clip_gradient_norm(0.0).expect_err("no bound");
    assert!(matches!(error, Error::Optim(OptimError::BadOption { .. })), "{error}");
    let error = optimizer.group("empty", |_| false, Sgd::new(0.1)).expect_err("nobody");
    assert!(matches!(error, Error::Optim(OptimError::EmptyGroup { .. })), "{error}");
}

/// A name is taken wherever its members are, and a group is created on all devices or on none.
#[test]
fn a_group_that_cannot_be_is_made_nowhere() {
    let mut pipe = builder(mlp(), 2).build().expect("a pipeline");
    let (names, split) = (pipe.variables().expect("variables"), pipe.balance().sizes()[0]);
    let layers: Vec<String> = pipe.names().map(str::to_owned).collect();
    let of = |half: usize| {
        let own = if half == 0 { &layers[..split] } else { &layers[split..] };
        let own: Vec<String> = own.iter().map(|layer| format!("{layer}.")).collect();
        move |name: &str| own.iter().any(|layer| name.starts_with(layer))
    };
    assert!(names.iter().any(|(name, _)| of(0)(name)) && names.iter().any(|(name, _)| of(1)(name)));
    let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
    optimizer.group("one", of(0), Sgd::new(0.1)).expect("a group");
    let error = optimizer.group("one", of(1), Sgd::new(0.2)).expect_err("the name is taken");
    assert!(matches!(error, Error::Optim(OptimError::BadGroup { .. })), "{error}");
    let error = optimizer.group("all", |_| true, Sgd::new(0.2)).expect_err("some are taken");
    assert!(matches!(error, Error::Optim(OptimError::BadGroup { .. })), "{error}");
    optimizer.group("two", of(1), Sgd::new(0.2)).expect("nothing of the others is left");
}

#[test]
fn every_action_is_reported_with_its_time() {
    let mut pipe = piped(mlp(), 3, 5);
    let (x, y) = ((MLP.input)(10), (MLP.target)(10));
    let step = pipe.backward(&x, &y, MLP.loss).expect("a step");
    let timeline = step.timeline.expect("a pipeline's");
    for (spans, list) in timeline.spans.iter().zip(timeline.actions.lists()) {
        let actions: Vec<_> = spans.iter().map(|span| span.action).collect();
        assert_eq!(&actions, list);
        assert!(spans.iter().all(|span| span.start <= span.end));
        assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }
    assert!((0.0..1.0).contains(&timeline.bubble()));
    let simulated = simulate(&timeline.actions, &Costs::ticks(3)).expect("simulated").bubble();
    assert!((0.0..1.0).contains(&simulated));
    let trace: serde_json::Value = serde_json::from_str(&timeline.trace()).expect("JSON");
    assert_eq!(trace["traceEvents"].as_array().expect("events").len(), 3 + 3 * 10);
}

#[test]
fn a_balance_is_found_by_measuring() {
    let sample = (MLP.input)(4);
    for balance in [BalanceBy::by_time(&sample), BalanceBy::by_bytes(&sample)] {
        let mut pipe = builder(mlp(), 3)
            .balance(balance)
            .micro_batches(MicroBatches::Count(4))
            .build()
            .expect("a pipeline");
        assert_eq!(pipe.balance().sizes().iter().sum::<usize>(), 8);
        assert_eq!(pipe.balance().sizes().len(), 3);
        let y = (MLP.target)(4);
        pipe.backward(&sample, &y, MLP.loss).expect("a step");
    }
    let sample = (U_NET.input)(4);
    let pipe = builder((U_NET.layers)(), 2).balance(BalanceBy::by_time(&sample)).build();
    assert_eq!(pipe.expect("a pipeline").balance().sizes().len(), 2);
}

/// The tokens of the input do not reveal the dtype.
#[test]
fn layers_are_measured_in_the_kind_that_they_are_trained_in() {
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let watch = Arc::clone(&seen);
    let layers = Layers::new()
        .add("table", |p| nn::embedding(p, 11, 8, Default::default()))
        .add("mix", |p| nn::linear(p, 8, 8, Default::default()))
        .add_fn("watch", move |x| {
            watch.lock().expect("nobody panics").insert(format!("{:?}", x.kind()));
            x.tanh()
        });
    let tokens = (GPT.input)(4);
    for kind in [Kind::BFloat16, Kind::Float, Kind::Double] {
        for balance in [BalanceBy::by_time(&tokens), BalanceBy::by_bytes(&tokens)] {
            builder(layers.clone(), 2).kind(kind).balance(balance).build().expect("a pipeline");
            let seen = std::mem::take(&mut *seen.lock().expect("nobody panics"));
            assert_eq!(seen, [format!("{kind:?}")].into());
        }
    }
}

/// Layers: a wide one that keeps 4 × `numbers` activations per sample, and two with most of the parameters.
fn wide(numbers: i64) -> Layers {
    let linear = |from, to| move |p: &nn::Path| nn::linear(p, from, to, Default::default());
    let wide = move |p: &nn::Path| {
        let small = nn::linear(p, 4, 4, Default::default());
        nn::seq().add(small).add_fn(move |x| x.repeat([1, numbers]).tanh().narrow(1, 0, 4))
    };
    Layers::new().add("wide", wide).add("in", linear(4, 640)).add("out", linear(640, 4))
}

fn by_bytes(layers: Layers, kind: Kind, method: Option<Method>) -> Vec<usize> {
    let balance = BalanceBy::by_bytes(&Tensor::zeros([1, 4], (kind, Device::Cpu)));
    let balance = method.into_iter().fold(balance, BalanceBy::optimizer);
    let pipe = builder(layers, 2).kind(kind).balance(balance).build();
    pipe.expect("a pipeline").balance().sizes().to_vec()
}

/// The activations kept by the wide layer exceed the parameters and gradients of two layers, but not with Adam's
/// state added.
#[test]
fn a_balance_by_bytes_counts_the_optimizer() {
    let found = |method| by_bytes(wide(2000), Kind::Float, method);
    assert_eq!(found(None), [1, 2]);
    assert_eq!(found(Some(Sgd::new(0.1).into())), [1, 2]);
    assert_eq!(found(Some(Adam::new(0.1).into())), [2, 1]);
}

/// With bf16, gradient sums and the parameters that SGD updates take twice as much.
#[test]
fn a_balance_by_bytes_counts_what_half_precision_keeps_in_f32() {
    let [float, half] = [Kind::Float, Kind::BFloat16];
    assert_eq!([float, half].map(|kind| by_bytes(wide(1600), kind, None)), [[1, 2], [2, 1]]);
    let sgd = || Some(Sgd::new(0.1).into());
    assert_eq!([None, sgd()].map(|method| by_bytes(wide(2000), half, method)), [[1, 2], [2, 1]]);
    assert_eq!(by_bytes(wide(2000), float, sgd()), [1, 2]);
}

#[test]
fn fewer_samples_than_micro_batches_and_more_devices_than_stages_are_fine() {
    let mut pipe = builder(mlp(), 6)
        .balance([5, 3])
        .micro_batches(MicroBatches::Count(8))
        .build()
        .expect("a pipeline");
    assert_eq!(pipe.devices().len(), 2);
    let step = pipe.backward(&(MLP.input)(3), &(MLP.target)(3), MLP.loss).expect("a step");
    assert_eq!(step.sizes, [1, 1, 1]);
    assert_eq!(step.timeline.expect("a pipeline's").actions.micro_batches(), 3);
}

#[test]
fn what_cannot_be_built_is_refused_with_numbers() {
    let error = |builder: Builder| builder.build().expect_err("something is wrong").to_string();
    let cpus = |n| (0..n).map(|_| DeviceSpec::cpu());
    let base = || Pipeline::builder(mlp()).devices(cpus(2));
    let cases = [
        (error(Pipeline::builder(Layers::new())), "the model has no layer: add at least one"),
        (error(base().balance([3, 4])), "balance [3, 4] sums to 7, but the model has 8 layers"),
        (error(base().balance([8, 0])), "stage 1 of balance [8, 0] is empty"),
        (error(base().balance(Vec::new())), "there is no stage to put the layers on"),
        (
            error(base().balance([3, 3, 2])),
            "3 stages, 1 on a device, need 3 devices, but there are 2",
        ),
        (error(base().devices(cpus(0))), "there is no stage to put the layers on"),
        (error(base().devices(cpus(9))), "9 stages need at least 9 layers, but the model has 8"),
        (
            error(base().micro_batches(MicroBatches::Count(0))),
            "1 samples cannot be cut into 0 micro-batches",
        ),
        (
            error(base().micro_batches(MicroBatches::Samples(0))),
            "a micro-batch cannot have 0 samples",
        ),
        (
            error(base().schedule(INTERLEAVED).balance([3, 3, 2])),
            "the schedule puts 2 stages on each device, but the balance has 3: give",
        ),
        (
            error(
                base()
                    .schedule(Schedule::InterleavedZeroBubble { stages_per_device: 3 })
                    .offload(Offload::Host),
            ),
            "3W0 needs stage 3's weights, but device 1 has 2 buffers for offloaded stages",
        ),
        (error(base().devices([Device::Cuda(99)])), "there is no device 'cuda:99' here"),
        (
            error(Pipeline::builder(mlp().stash("skip"))),
            "layer 8 stashes 'skip', which no layer pops",
        ),
    ];
    for (found, expected) in cases {
        assert!(found.starts_with(expected), "{found}");
    }
    let small = Arena::limited("small", 100).expect("a limit");
    let error = Pipeline::builder(mlp()).devices([small]).build().expect_err("too little memory");
    assert!(error.out_of_memory().is_some(), "{error}");
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

#[test]
fn inputs_that_do_not_match_are_refused_and_nothing_is_lost() {
    let mut pipe = piped(mlp(), 2, 2);
    let error = pipe.backward(&(MLP.input)(4), &(MLP.target)(5), MLP.loss).expect_err("4 and 5");
    assert_eq!(error, Error::Batch(BatchError::LeafLengthsDiffer { lengths: vec![4, 5] }));
    // A loss without targets passes none.
    pipe.backward(&(MLP.input)(4), &(), |out: Tensor, ()| Loss::mean(out.sum(Kind::Double)))
        .expect("a step");
    let empty = Tensor::zeros([0, 4], DOUBLE);
    assert_eq!(
        eval(&mut pipe, &empty, MicroBatches::Count(1)).expect_err("nothing"),
        Error::Batch(BatchError::Empty)
    );
    let wide = Tensor::zeros([4, 9], DOUBLE);
    let failed = pipe.backward(&wide, &(MLP.target)(4), MLP.loss);
    assert_fails(failed, &["micro-batch 0, in layer 'fc1'"]);
    assert_fails(pipe.freeze(|name| name == "nobody"), &["the first of 10 is 'fc1.bias'"]);
    pipe.backward(&(MLP.input)(4), &(MLP.target)(4), MLP.loss).expect("a step");
}

#[test]
fn gradients_that_are_not_finite_are_refused_on_request() {
    // The root of 0 has an infinite slope: the loss is finite, its gradient is not.
    let layers = || {
        Layers::new()
            .add("fc", |p| nn::linear(p, 2, 2, Default::default()))
            .add_fn("first", |x| x.shallow_clone())
            .add_fn("root", |x| (x * 0.0).sqrt())
    };
    let x = Tensor::ones([4, 2], DOUBLE);
    let sum = |out: Tensor, _: &Tensor| Loss::mean(out.sum(Kind::Double));
    let mut pipe = piped(layers(), 3, 2);
    pipe.backward(&x, &x, sum).expect("nobody looks");
    let strict = builder(layers(), 3)
        .micro_batches(MicroBatches::Count(2))
        .non_finite(NonFinitePolicy::RefuseGradients);
    let mut pipe = strict.build().expect("a pipeline");
    let error = pipe.backward(&x, &x, sum).expect_err("not finite");
    assert_eq!(error, Error::Step(StepError::NonFiniteGradient { micro_batch: 0 }));
    assert!(pipe.gradients().expect("gradients").is_empty());
}

/// f16 overflows at 65,504: the contribution of each micro-batch, and of each stage that has the weight, is
/// finite.
#[test]
fn gradients_that_are_not_finite_as_they_are_committed_are_refused() {
    let weight = |p: &nn::Path| {
        let weight = p.get("weight").unwrap_or_else(|| p.ones("weight", &[1]));
        nn::func(move |x| x * &weight)
    };
    let own = || Layers::new().add("one", weight).add("two", weight);
    let shared =
        || Layers::new().add("one", weight).add_sharing("two", "one", move |_, p| weight(p));
    let strict = |layers| {
        let builder = builder(layers, 2).kind(Kind::Half).micro_batches(MicroBatches::Samples(1));
        builder.non_finite(NonFinitePolicy::RefuseGradients).build().expect("a pipeline")
    };
    let half = |samples| Tensor::full([samples, 1], 4e4, (Kind::Half, Device::Cpu));
    let sum = |out: &Tensor| out.to_kind(Kind::Float).sum(Kind::Float);
    for (layers, samples) in [(own(), 2), (shared(), 1)] {
        let mut pipe = strict(layers);
        let x = half(samples);
        let one = pipe.backward(&x, &x, move |out: Tensor, _: &Tensor| Loss::sum(sum(&out)));
        assert_fails(one.map(drop), &["weight' is not finite in Half"]);
        let two = pipe.backward_whole(&x, |out| sum(out)).map(drop);
        assert_fails(two, &["weight' is not finite in Half"]);
        let out = pipe.forward(&x).expect("outputs");
        sum(&out).backward();
        assert_fails(pipe.backward_from(out).map(drop), &["weight' is not finite in Half"]);
        assert!(pipe.gradients().expect("gradients").is_empty());
    }
}

/// tch's own BatchNorm updates its statistics at every micro-batch, but not again in a recompute, and is restored
/// if the step fails.
#[test]
fn foreign_batch_norm_moves_once_a_micro_batch() {
    tch::manual_seed(13);
    let layers = || {
        Layers::new()
            .add("fc", |p| nn::linear(p, 3, 3, Default::default()))
            .add("bn", |p| nn::batch_norm1d(p, 3, Default::default()))
            .add_fn("last", |x| x.shallow_clone())
    };
    let running = |mut all: Named| {
        all.retain(|(name, _)| name.contains("running"));
        copies(&all)
    };
    for recompute in Recompute::ALL {
        let mut pipe = builder(layers(), 2)
            .balance([2, 1])
            .micro_batches(MicroBatches::Count(3))
            .recompute(recompute)
            .build();
        let pipe = pipe.as_mut().expect("a pipeline");
        let plain = Plain::of(&layers(), pipe);
        for _ in 0..2 {
            let x = Tensor::randn([9, 3], DOUBLE);
            let before = running(pipe.variables().expect("variables"));
            let failed =
                pipe.backward(&x, &x, |out: Tensor, _| Loss::mean(out.sum(Kind::Double) / 0.0));
            assert!(failed.is_err());
            let after = running(pipe.variables().expect("variables"));
            assert_close(&after, &before, "a step that failed");
            let step = pipe.backward(&x, &x, mse).expect("a step");
            assert_eq!(step.unmanaged_norms, 1);
            for part in x.to_device(test_device()).chunk(3, 0) {
                let _out = plain.model.forward_t(&part, true);
            }
            let found = running(pipe.variables().expect("variables"));
            assert_close(&found, &running(plain.values()), &format!("{recompute}"));
        }
    }
}

#[test]
fn a_skip_may_be_of_nothing() {
    let layers = Layers::new()
        .add("fc", |p| nn::linear(p, 2, 2, Default::default()))
        .add_many("aside", |_| |x, _| vec![x[0].shallow_clone()])
        .add_many("none", |_| |_, _| Vec::new())
        .stash("nothing")
        .add_many("one", |p| {
            let number = p.zeros("number", &[1, 2]);
            move |_, _| vec![number.shallow_clone()]
        })
        .pop_many("pop", "nothing", |x, nothing| {
            assert!(nothing.is_empty());
            x.iter().map(Tensor::shallow_clone).collect()
        });
    let mut pipe = builder(layers, 3).balance([4, 1, 1]).build().expect("a pipeline");
    let x = Tensor::ones([1, 2], DOUBLE);
    pipe.backward(&x, &x, mse).expect("a step");
    let trained: Vec<_> = pipe.gradients().expect("gradients").into_iter().map(|g| g.0).collect();
    assert_eq!(trained, ["one.number"]);
}

#[test]
fn what_is_done_to_gradients_between_forward_and_backward_counts() {
    let build = || {
        let layers = Layers::new()
            .add("one", |p| nn::linear(p, 4, 4, Default::default()))
            .add("two", |p| nn::linear(p, 4, 4, Default::default()));
        tch::manual_seed(5);
        let devices = [Device::Cpu, Device::Cpu];
        Pipeline::builder(layers)
            .devices(devices)
            .micro_batches(MicroBatches::Count(2))
            .build()
            .expect("a pipeline")
    };
    let x = Tensor::ones([6, 4], (Kind::Float, Device::Cpu));
    let loss = |out: &Tensor| out.square().sum(Kind::Float);
    let run = |pipe: &mut Pipeline, between: &dyn Fn(&mut Pipeline)| {
        let outputs = pipe.forward(&x).expect("outputs");
        between(pipe);
        loss(&outputs).backward();
        pipe.backward_from(outputs).expect("a step");
    };
    let gradients = |pipe: &Pipeline| copies(&pipe.gradients().expect("gradients"));
    // Clears gradients after the forward, as PyTorch loops do.
    let (mut once, mut often) = (build(), build());
    run(&mut once, &|_| ());
    for _ in 0..3 {
        run(&mut often, &|pipe| pipe.zero_grad().expect("cleared"));
    }
    assert_eq!(gradients(&once).len(), 4);
    assert_eq!(gradients(&often), gradients(&once));
    // An abandoned forward leaves the gradients unchanged.
    let before = gradients(&often);
    let _ = often.forward(&x).expect("outputs");
    assert_eq!(gradients(&often), before);
    often.zero_grad().expect("cleared");
    run(&mut often, &|_| ());
    assert_eq!(gradients(&often), before);
    // A variable frozen after the forward gets no gradient, and no other variable gets its.
    let mut frozen = build();
    let weight = |pipe: &Pipeline, name: &str| {
        let variables = pipe.variables().expect("variables");
        variables.into_iter().find(|(n, _)| n == name).expect("a weight").1
    };
    run(&mut frozen, &|pipe| drop(weight(pipe, "one.weight").set_requires_grad(false)));
    for name in ["one.bias", "two.weight", "two.bias"] {
        assert_eq!(weight(&frozen, name).grad(), weight(&once, name).grad(), "{name}");
    }
    assert!(!weight(&frozen, "one.weight").grad().defined());
}

/// The step occupies the workers, and would wait for its own loss.
#[test]
fn an_optimizer_inside_a_step_is_refused_and_no_wait_for_ever() {
    let mut pipe = piped(mlp(), 2, 2);
    let optimizer = pipe.optimizer(Sgd::new(0.1)).expect("an optimizer");
    let averages = pipe.ema(0.9).expect("averages");
    let used = Arc::new(Mutex::new((optimizer, averages, Vec::new())));
    let x = (MLP.input)(4);
    let inside = Arc::clone(&used);
    let loss = move |out: Tensor, _: &Tensor| {
        let (optimizer, averages, said) = &mut *inside.lock().expect("one thread at a time");
        said.extend([optimizer.step(), averages.update()]);
        Loss::mean(out.mean(Kind::Double))
    };
    pipe.backward(&x, &x, loss).expect("a step");
    let (optimizer, _, said) = &mut *used.lock().expect("nobody panicked");
    assert_eq!(said.len(), 4);
    for result in said {
        let error = result.as_ref().expect_err("inside a step");
        assert!(matches!(error, Error::InStep), "{error}");
    }
    optimizer.step().expect("behind the step");
}

/// bf16 has 8 bits: from 256 to 512 it has the even numbers alone. So a gradient of 257 and more is 258 if it is
/// rounded once, after all pipelines and all stages that have the weight are added up, and 256 if each of them rounds
/// its own.
#[test]
fn gradients_in_half_precision_are_rounded_once_over_replicas_and_tied_stages() {
    let weight = |p: &nn::Path| p.get("weight").unwrap_or_else(|| p.ones("weight", &[1]));
    let times = move |p: &nn::Path| {
        let weight = weight(p);
        nn::func(move |x| x * &weight)
    };
    let plus = move |_: &nn::Path, p: &nn::Path| {
        let weight = weight(p);
        nn::func(move |x| x + &weight * 0.4375)
    };
    let one = || Layers::new().add("one", times);
    let two = || one().add_sharing("two", "one", plus);
    let cases = [
        ("two pipelines", builder(one(), 2).replicas(2), vec![256.0, 0.9375, 0.9375, 0.0]),
        ("tied stages", builder(two(), 2), vec![256.0, 0.4375]),
        ("both", builder(two(), 4).replicas(2), vec![256.0, 0.0, 0.0, 0.0]),
    ];
    for (what, builder, x) in cases {
        let builder = builder.kind(Kind::BFloat16).micro_batches(MicroBatches::Samples(1));
        let mut pipe = built(builder, what);
        let x = Tensor::from_slice(&x).to_kind(Kind::BFloat16).unsqueeze(1);
        pipe.backward(&x, &x, |out: Tensor, _: &Tensor| Loss::sum(out.sum(None))).expect("a step");
        let gradients = pipe.gradients().expect("gradients");
        assert_eq!((gradients.len(), gradients[0].1.kind()), (1, Kind::BFloat16), "{what}");
        assert_eq!(gradients[0].1.double_value(&[0]), 258.0, "{what}");
    }
}
