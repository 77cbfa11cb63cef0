//! Optimizers compared with tch's own, and their additional features: groups, saved state, atomic steps.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::state::fail_every_allocation;
use crate::support::{
    Named, Update, assert_fails, assert_same, copies, numbers_there, set_values, test_device,
    variables,
};
use brimful::Error;
use brimful::memory::Arena;
use brimful::optim::OptimError;
use brimful::optim::{
    Adafactor, Adam, AdamW, Ema, Method, Muon, Optimizer, Sgd, StateFormat, clip_gradient_norm,
};
use brimful::save;
use brimful::save::Metadata;
use brimful_torch::autograd::set_gradient;
use brimful_torch::memory_format::to_memory_format;
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

/// Several trainable variables of different shapes, one buffer, and a scalar.
fn store(kind: Kind) -> nn::VarStore {
    let mut vs = nn::VarStore::new(test_device());
    let root = vs.root();
    for (i, (name, shape)) in SHAPES.iter().enumerate() {
        let _ = root.var_copy(name, &numbers_there(shape, i as i64));
    }
    let _ = root.zeros_no_train("running_mean", &[3]);
    vs.set_kind(kind);
    for (i, (name, shape)) in SHAPES.iter().enumerate() {
        set(&vs, name, &numbers_there(shape, i as i64));
    }
    vs
}

const SHAPES: [(&str, &[i64]); 5] = [
    ("conv_weight", &[4, 3, 3, 3]),
    ("conv_bias", &[4]),
    ("head_weight", &[17, 33]),
    ("head_bias", &[17]),
    ("scale", &[]),
];

fn get(vs: &nn::VarStore, name: &str) -> Tensor {
    vs.variables().remove(name).expect("a variable of that name")
}

fn set(vs: &nn::VarStore, name: &str, value: &Tensor) {
    tch::no_grad(|| get(vs, name).copy_(value));
}

/// Sets gradients that depend on the parameters, the step and the position.
fn backward(vs: &nn::VarStore, step: i64) {
    backward_of(vs, step, &SHAPES.map(|(name, _)| name));
}

fn backward_of(vs: &nn::VarStore, step: i64, names: &[&str]) {
    let mut loss = Tensor::zeros([0_i64; 0], (Kind::Double, test_device()));
    for (i, name) in names.iter().enumerate() {
        let parameter = get(vs, name).to_kind(Kind::Double);
        let direction = numbers_there(&parameter.size(), 7 * step + i as i64);
        loss += (parameter.square() * 0.1 + parameter * direction).sum(Kind::Double);
    }
    loss.backward();
}

/// Returns the largest difference between two stores' variables, relative to their size.
fn difference(a: &nn::VarStore, b: &nn::VarStore) -> f64 {
    let of = |name: &str| {
        let (a, b) = (get(a, name).to_kind(Kind::Double), get(b, name).to_kind(Kind::Double));
        ((&a - &b).abs() / (b.abs() + 1.0)).max().double_value(&[])
    };
    SHAPES.iter().map(|(name, _)| of(name)).fold(0.0, f64::max)
}

fn assert_same_as_tch(kind: Kind, ours: Method, theirs: impl OptimizerConfig, bound: f64) {
    let (a, b) = (store(kind), store(kind));
    let mut opt_a = Optimizer::new(&a, ours).expect("an optimizer");
    let mut opt_b = theirs.build(&b, ours.learning_rate()).expect("tch's optimizer");
    for step in 0..20 {
        backward(&a, step);
        opt_a.update();
        backward(&b, step);
        opt_b.step();
        opt_b.zero_grad();
    }
    let difference = difference(&a, &b);
    assert!(difference <= bound, "{ours:?} in {kind:?}: {difference:e}");
}

const BOUNDS: [(Kind, f64); 2] = [(Kind::Double, 1e-12), (Kind::Float, 2e-6)];

#[test]
fn sgd_is_tchs_with_every_combination_of_options() {
    for (kind, bound) in BOUNDS {
        for decay in [0.0, 0.1] {
            for (momentum, dampening, nesterov) in
                [(0.0, 0.0, false), (0.9, 0.0, false), (0.9, 0.3, false), (0.9, 0.0, true)]
            {
                let ours = Sgd::new(0.05).momentum(momentum).dampening(dampening);
                let ours = ours.weight_decay(decay).nesterov(nesterov);
                let theirs = nn::sgd(momentum, dampening, decay, nesterov);
                assert_same_as_tch(kind, ours.into(), theirs, bound);
            }
        }
    }
}

#[test]
fn adam_and_adamw_are_tchs_with_every_combination_of_options() {
    for (kind, bound) in BOUNDS {
        for decay in [0.0, 0.1] {
            for (beta1, beta2) in [(0.9, 0.999), (0.0, 0.5)] {
                for amsgrad in [false, true] {
                    let ours = Adam::new(0.02).betas(beta1, beta2).eps(1e-6);
                    let ours = ours.weight_decay(decay).amsgrad(amsgrad);
                    let theirs = nn::adam(beta1, beta2, decay).eps(1e-6).amsgrad(amsgrad);
                    assert_same_as_tch(kind, ours.into(), theirs, bound);
                    let ours = AdamW::new(0.02).betas(beta1, beta2).eps(1e-6);
                    let ours = ours.weight_decay(decay).amsgrad(amsgrad);
                    let theirs = nn::adamw(beta1, beta2, decay).eps(1e-6).amsgrad(amsgrad);
                    assert_same_as_tch(kind, ours.into(), theirs, bound);
                }
            }
        }
    }
    assert_same_as_tch(Kind::Double, AdamW::new(0.02).into(), nn::AdamW::default(), 1e-12);
}

#[test]
fn a_step_leaves_the_gradients_as_they_are() {
    let vs = store(Kind::Double);
    let config = Sgd::new(0.1).momentum(0.9).nesterov(true).weight_decay(0.1);
    let mut opt = Optimizer::new(&vs, config).expect("an optimizer");
    backward(&vs, 0);
    let before = get(&vs, "head_weight").grad().copy();
    opt.step().expect("a step");
    assert_eq!(get(&vs, "head_weight").grad(), before);
    opt.zero_grad().expect("zeroed");
    assert!(!get(&vs, "head_weight").grad().defined());
}

/// Autograd relies on the version, and so do copies of the parameters in a pipeline. On CUDA the last steps use
/// CUDA graphs.
#[test]
fn every_step_counts_as_a_change_of_the_parameters() {
    for (kind, config) in [(Kind::Float, 0), (Kind::Float, 1), (Kind::BFloat16, 1)] {
        let config = [Sgd::new(0.1).into(), Method::from(Adam::new(0.1))][config];
        let vs = store(kind);
        let mut opt = Optimizer::new(&vs, config).expect("an optimizer").cuda_graphs(true);
        backward(&vs, 0);
        let versions = || SHAPES.map(|(name, _)| get(&vs, name).internal_version());
        for step in 0..6 {
            let before = versions();
            opt.step().expect("a step");
            let all = before.iter().zip(versions()).all(|(before, after)| *before < after);
            assert!(all, "{config:?}, step {step}: {before:?}, {:?}", versions());
        }
        assert!(opt.replayed() > 0 || !test_device().is_cuda());
    }
}

#[test]
fn memory_formats_other_than_contiguous_are_updated_in_the_right_order() {
    let shape = [6, 4, 3, 3];
    let value = numbers_there(&shape, 0);
    let plain = value.copy();
    let with_gaps = Tensor::zeros([6, 4, 3, 6], (Kind::Double, test_device())).slice(3, 0, 6, 2);
    let channels_last = to_memory_format(&value, true).expect("channels last");
    let turned = value.copy().permute([3, 1, 0, 2]).contiguous().permute([2, 1, 3, 0]);
    let layouts = [plain, with_gaps, channels_last, turned];
    assert!(layouts[1..].iter().all(|tensor| !tensor.is_contiguous()));
    for config in [Method::from(AdamW::new(0.1)), Sgd::new(0.1).momentum(0.9).into()] {
        for gradient_layout in 0..layouts.len() {
            let mut results = Vec::new();
            for layout in &layouts {
                let mut tensor = strided_like(layout).set_requires_grad(true);
                tch::no_grad(|| tensor.copy_(&value));
                let named = vec![("w".to_owned(), tensor.shallow_clone())];
                let mut opt = Optimizer::for_named(named, config).expect("an optimizer");
                for step in 0..3 {
                    let mut gradient = strided_like(&layouts[gradient_layout]);
                    gradient.copy_(&numbers_there(&shape, step));
                    set_gradient(&mut tensor, Some(&gradient)).expect("a gradient");
                    opt.step().expect("a step");
                }
                results.push(tensor.detach().contiguous());
            }
            for result in &results {
                assert_eq!(result, &results[0], "{config:?}, gradient {gradient_layout}");
            }
        }
    }
}

/// Returns a new tensor with the same shape and strides, gaps included.
fn strided_like(tensor: &Tensor) -> Tensor {
    Tensor::empty_strided(tensor.size(), tensor.stride(), (tensor.kind(), tensor.device()))
}

#[test]
fn groups_have_their_own_options_and_learning_rates() {
    let (a, b) = (store(Kind::Double), store(Kind::Double));
    let config = AdamW::new(0.02).weight_decay(0.1);
    let mut opt = Optimizer::new(&a, config).expect("an optimizer");
    opt.group("decay-free", |name| name.ends_with("bias"), config.weight_decay(0.0)).expect("one");
    opt.group("head", |name| name == "head_weight", Sgd::new(0.5)).expect("another method");
    let part = |names: &[&str]| -> Named {
        names.iter().map(|name| (name.to_string(), get(&b, name))).collect()
    };
    let mut parts = [
        Optimizer::for_named(part(&["conv_weight", "scale"]), config).expect("the rest"),
        Optimizer::for_named(part(&["conv_bias", "head_bias"]), config.weight_decay(0.0))
            .expect("biases"),
        Optimizer::for_named(part(&["head_weight"]), Sgd::new(0.5)).expect("the head"),
    ];
    for step in 0..5 {
        if step == 2 {
            opt.set_group_learning_rate("decay-free", 0.3).expect("a rate");
            parts[1].set_learning_rate(0.3).expect("a rate");
        }
        backward(&a, step);
        backward(&b, step);
        opt.update();
        for part in &mut parts {
            part.update();
        }
    }
    assert_eq!(difference(&a, &b), 0.0);
    assert_eq!((opt.learning_rate(), opt.group_learning_rate("head")), (0.02, Ok(0.5)));
    opt.set_learning_rate(0.1).expect("a rate");
    assert_eq!(opt.group_learning_rate("decay-free"), Ok(0.1));
}

#[test]
fn parameters_without_gradient_and_frozen_ones_stay_with_their_state() {
    let (a, b) = (store(Kind::Double), store(Kind::Double));
    let config = AdamW::new(0.02);
    let mut opt = Optimizer::new(&a, config).expect("an optimizer");
    // Takes the same steps for each parameter on its own.
    let alone = |name: &str| vec![(name.to_owned(), get(&b, name))];
    let mut bias = Optimizer::for_named(alone("head_bias"), config).expect("an optimizer");
    let mut weight = Optimizer::for_named(alone("head_weight"), config).expect("an optimizer");
    for (step, names) in [&["head_bias"][..], &["head_bias", "head_weight"], &["head_weight"]]
        .into_iter()
        .enumerate()
    {
        backward_of(&a, step as i64, names);
        backward_of(&b, step as i64, names);
        for opt in [&mut opt, &mut bias, &mut weight] {
            opt.update();
        }
    }
    assert_eq!(difference(&a, &b), 0.0);

    backward(&a, 9);
    let frozen = get(&a, "scale").set_requires_grad(false);
    let before = frozen.copy();
    opt.step().expect("a step");
    assert_eq!(get(&a, "scale"), before);
    assert!(opt.state().expect("a state").0.iter().all(|(name, _)| !name.starts_with("scale")));
    // A buffer is not a parameter.
    let (_, texts) = opt.state().expect("a state");
    assert!(!texts.contains_key("parameter.running_mean"));
    let parameters = texts.keys().filter(|key| key.starts_with("parameter."));
    assert_eq!(parameters.count(), SHAPES.len());
}

fn configs() -> Vec<Method> {
    vec![
        Sgd::new(0.05).into(),
        Sgd::new(0.05).momentum(0.9).nesterov(true).into(),
        Adam::new(0.02).amsgrad(true).into(),
        AdamW::new(0.02).into(),
        AdamW::new(0.02).state_format(StateFormat::Bf16).into(),
        Adam::new(0.02).amsgrad(true).state_format(StateFormat::EightBit).into(),
        Sgd::new(0.05).momentum(0.9).state_format(StateFormat::EightBit).into(),
        Adafactor::new(0.02).weight_decay(0.1).into(),
        Muon::new(0.02).into(),
        Muon::new(0.02).state_format(StateFormat::EightBit).into(),
    ]
}

fn train(vs: &nn::VarStore, opt: &mut Optimizer, steps: std::ops::Range<i64>) {
    for step in steps {
        backward(vs, step);
        opt.update();
    }
}

fn new_optimizer(vs: &nn::VarStore, config: Method) -> Optimizer {
    let mut opt = Optimizer::new(vs, config).expect("an optimizer");
    opt.group("bias", |name| name.ends_with("bias"), config).expect("a group");
    opt
}

#[test]
fn a_saved_state_goes_on_exactly_where_it_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("optimizer.safetensors");
    for (turn, kind) in [Kind::Double, Kind::Float, Kind::BFloat16].into_iter().enumerate() {
        for (number, config) in configs().into_iter().enumerate() {
            let trained = |steps| {
                let vs = store(kind);
                let mut opt = new_optimizer(&vs, config);
                opt.set_group_learning_rate("bias", 0.1 + 0.2).expect("a rate");
                train(&vs, &mut opt, 0..steps);
                (vs, opt)
            };
            let (undisturbed, _) = trained(6);
            let (first, opt) = trained(3);
            opt.save(&path).expect("saved");

            let second = store(kind);
            let mut opt = new_optimizer(&second, config);
            // Each method meets both orders.
            let model_first = (turn + number) % 2 == 0;
            if !model_first {
                opt.load(&path).expect("loaded");
            }
            set_values(&second, &variables(&first));
            if model_first {
                opt.load(&path).expect("loaded");
            }
            train(&second, &mut opt, 3..6);
            assert_eq!(difference(&undisturbed, &second), 0.0, "{config:?} in {kind:?}");
            assert_eq!(opt.group_learning_rate("bias"), Ok(0.1 + 0.2));
        }
    }
}

#[test]
fn saved_names_are_the_parameters_and_their_slots() {
    let vs = store(Kind::BFloat16);
    let mut opt = Optimizer::new(&vs, AdamW::new(0.02)).expect("an optimizer");
    train(&vs, &mut opt, 0..2);
    let (tensors, metadata) = opt.state().expect("a state");
    let names: Vec<_> = tensors.iter().map(|(name, _)| name.as_str()).take(4).collect();
    let slots = ["exp_avg", "exp_avg_sq", "remainder", "step"];
    assert_eq!(names, slots.map(|slot| format!("conv_bias.{slot}")));
    assert_eq!(tensors[3].1.double_value(&[]), 2.0);
    let kinds: Vec<_> = tensors.iter().map(|(_, tensor)| tensor.kind()).take(4).collect();
    assert_eq!(kinds, [Kind::Float, Kind::Float, Kind::Int16, Kind::Float]);
    assert_eq!(metadata["parameter.conv_bias"], "default");
    assert!(metadata["group.default"].contains(r#""method":"adamw""#), "{metadata:?}");
}

#[test]
fn a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing() {
    let vs = store(Kind::Double);
    let config = AdamW::new(0.02);
    let mut opt = Optimizer::new(&vs, config).expect("an optimizer");
    train(&vs, &mut opt, 0..2);
    let (good, metadata) = opt.state().expect("a state");
    let before = copies(&good);

    let mut shape = copies(&good);
    shape[0].1 = Tensor::zeros([5], (Kind::Double, test_device()));
    let mut missing = copies(&good);
    missing.retain(|(name, _)| name != "head_weight.exp_avg_sq");
    let mut unknown = copies(&good);
    unknown.push(("tail.exp_avg".into(), Tensor::zeros([5], (Kind::Double, test_device()))));
    let without = |key: &str| -> Metadata {
        metadata.iter().filter(|(k, _)| *k != key).map(|(k, v)| (k.clone(), v.clone())).collect()
    };
    let with = |key: &str, value: &str| -> Metadata {
        let mut changed = metadata.clone();
        changed.insert(key.into(), value.into());
        changed
    };
    let sgd = Optimizer::new(&vs, Sgd::new(0.1)).expect("an optimizer").state().expect("a state").1;
    for (tensors, metadata, words) in [
        (
            &shape,
            metadata.clone(),
            "'conv_bias.exp_avg' is Double of shape [5] in it, but Double of shape [4] here",
        ),
        (
            &missing,
            metadata.clone(),
            "'head_weight.exp_avg_sq' is missing in it, but Double of shape [17, 33] here",
        ),
        (
            &unknown,
            metadata.clone(),
            "'tail.exp_avg' is Double of shape [5] in it, but nothing here",
        ),
        (
            &good,
            without("parameter.scale"),
            "'scale' is missing in it, but in group 'default' here",
        ),
        (
            &good,
            with("parameter.tail", "default"),
            "'tail' is in group 'default' in it, but missing here",
        ),
        (&good, with("group.bias", "{}"), "'bias' is a group in it, but none here"),
        (&good, with("group.default", "{}"), "'default' is not a group's options"),
        (&good, sgd, "'default' is sgd in it, but adamw here"),
        (&good, Metadata::new(), "'format' is 'nothing' in it"),
    ] {
        assert_fails(opt.load_state(tensors, &metadata), &[words]);
        assert_same(words, &before, &opt.state().expect("a state").0);
    }
    opt.load_state(&good, &metadata).expect("its own state");
}

/// Returns copies of everything that a step changes.
fn everything(vs: &nn::VarStore, opt: &Optimizer) -> Named {
    let mut all = opt.state().expect("a state").0;
    all.extend(SHAPES.map(|(name, _)| (name.to_owned(), get(vs, name))));
    copies(&all)
}

#[test]
fn a_step_that_runs_out_of_memory_anywhere_changes_nothing() {
    if test_device() != Device::Cpu {
        return;
    }
    for kind in [Kind::Float, Kind::BFloat16] {
        for config in configs() {
            for steps_before in 0..2 {
                fail_everywhere(kind, config, steps_before);
            }
        }
    }
}

fn fail_everywhere(kind: Kind, config: Method, steps_before: i64) {
    let stores = [store(kind), store(kind)];
    let mut optimizers = stores.each_ref().map(|vs| new_optimizer(vs, config));
    for (vs, opt) in stores.iter().zip(&mut optimizers) {
        train(vs, opt, 0..steps_before);
        // Set by hand since then, one of them to another value: the master weights are stale.
        SHAPES.iter().for_each(|(name, _)| set(vs, name, &get(vs, name)));
        set(vs, "conv_weight", &numbers_there(SHAPES[0].1, 9));
        backward(vs, 5);
        // A gradient with other strides than its parameter, so that it is copied.
        let mut weight = get(vs, "head_weight");
        let turned = weight.grad().tr().contiguous().tr();
        set_gradient(&mut weight, Some(&turned)).expect("a gradient");
    }
    let ([vs, undisturbed], [opt, other]) = (&stores, &mut optimizers);

    let arena = Arena::new("optimizer");
    let what = format!("{config:?}");
    let step = |opt: &mut Optimizer| {
        let _inside = arena.enter();
        opt.step()
    };
    let failures = fail_every_allocation(&what, &arena, opt, |opt| everything(vs, opt), step);
    // The transposed gradient needs scratch memory, so every step allocates something.
    assert!(failures >= 1, "{config:?}: {failures}");
    other.step().expect("a step");
    assert_eq!(difference(vs, undisturbed), 0.0, "{config:?}");
    for (vs, opt) in [(vs, opt), (undisturbed, other)] {
        opt.zero_grad().expect("zeroed");
        train(vs, opt, 6..8);
    }
    assert_eq!(difference(vs, undisturbed), 0.0, "{config:?}, two steps later");
}

#[test]
fn small_updates_of_a_bf16_parameter_are_not_lost() {
    let run = |kind: Kind, is_set: bool| {
        let tensor = Tensor::ones([64], (kind, test_device())).set_requires_grad(true);
        let named = vec![("w".to_owned(), tensor.shallow_clone())];
        let mut opt = Optimizer::for_named(named, Sgd::new(1e-4)).expect("an optimizer");
        for _ in 0..1000 {
            tensor.sum(Kind::Float).backward();
            if is_set {
                // To its present value, except for the last element.
                let _ = tch::no_grad(|| tensor.slice(0, 63, 64, 1).fill_(1.0));
            }
            opt.update();
        }
        tensor.slice(0, 0, 63, 1).to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
    };
    assert!((run(Kind::Float, false) - 0.9).abs() < 1e-4);
    let rounded = run(Kind::BFloat16, false);
    assert!((rounded - 0.9).abs() < 2e-3, "one rounding of bf16");
    assert_eq!(run(Kind::BFloat16, true), rounded, "others are set");
    assert_eq!(run(Kind::Half, true), run(Kind::Half, false), "others are set");
}

/// Returns the Python of `make transformers`, whose torch has the optimizers to compare with. Without one, says so.
fn python_with_torch() -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    let home = cache.join("brimful/transformers");
    if home.join("installed.txt").is_file() {
        return Some(home.join("bin/python"));
    }
    // Bypasses the test harness, which captures what is printed.
    let _ =
        writeln!(std::io::stderr(), "skipped: torch's optimizers: no torch (make transformers)");
    None
}

/// In f64, where torch's Muon is let compute in f64 too.
#[test]
fn adafactor_and_muon_are_torchs() {
    let Some(python) = python_with_torch() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("torch.safetensors");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/torch_optimizers.py");
    // Python does not load libraries from the compiler's path.
    let ended = Command::new(python).arg(script).arg(&path).env_remove("LD_LIBRARY_PATH").output();
    let ended = ended.expect("Python");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let (tensors, _) = save::read(&path).expect("torch's results");
    let of = |name: &str| {
        let found = tensors.iter().find(|(known, _)| known == name);
        found.unwrap_or_else(|| panic!("there is no {name}")).1.to_device(test_device())
    };
    let muon = Muon::new(0.02);
    let cases: [(&str, Method); 7] = [
        ("adafactor", Adafactor::new(0.01).into()),
        ("adafactor_large", Adafactor::new(1.0).weight_decay(0.1).threshold(2.0).into()),
        ("adafactor_eps", Adafactor::new(0.5).beta2_decay(-0.5).eps(0.1, 0.5).into()),
        ("muon", muon.into()),
        ("muon_plain", muon.nesterov(false).momentum(0.8).weight_decay(0.0).into()),
        ("muon_rms", muon.match_rms_adamw(true).into()),
        ("muon_steps", muon.iteration(3, [2.0, -1.5, 0.5]).eps(0.5).into()),
    ];
    for (case, method) in cases {
        for shape in ["wide", "tall", "square", "conv", "vector", "transposed"] {
            let Some(number) = tensors.iter().position(|(n, _)| *n == format!("{case}.{shape}"))
            else {
                continue;
            };
            // Tensors that are read share the file's pages, so they are copied.
            let start = of(&format!("start.{shape}")).copy();
            let start = if shape == "transposed" { start.tr().contiguous().tr() } else { start };
            let tensor = start.set_requires_grad(true);
            let named = vec![("w".to_owned(), tensor.shallow_clone())];
            let mut opt = Optimizer::for_named(named, method).expect("an optimizer");
            for step in 0..6 {
                let gradient = of(&format!("gradient.{shape}.{step}"));
                set_gradient(&mut tensor.shallow_clone(), Some(&gradient)).expect("a gradient");
                opt.step().expect("a step");
            }
            let theirs = tensors[number].1.to_device(test_device());
            let difference = (tensor.detach() - &theirs).abs().max().double_value(&[]);
            assert!(difference < 1e-10, "{case}, {shape}: {difference:e}");
            let moved = (theirs - of(&format!("start.{shape}"))).abs().max().double_value(&[]);
            assert!(moved > 1e-3, "{case}, {shape}: {moved:e}");
        }
    }
}

#[test]
fn muon_updates_what_is_no_matrix_by_adamw() {
    let (a, b) = (store(Kind::Double), store(Kind::Double));
    let mut muon = Optimizer::new(&a, Muon::new(0.02)).expect("an optimizer");
    let mut adamw = Optimizer::new(&b, AdamW::new(0.02).weight_decay(0.1)).expect("an optimizer");
    for step in 0..3 {
        for (vs, opt) in [(&a, &mut muon), (&b, &mut adamw)] {
            backward(vs, step);
            opt.update();
        }
    }
    for (name, shape) in SHAPES {
        assert_eq!(get(&a, name) == get(&b, name), shape.len() != 2, "{name}");
    }
    let (state, _) = muon.state().expect("a state");
    let slots = state.iter().map(|(name, _)| name.as_str());
    let slots: Vec<_> = slots.filter(|name| name.starts_with("head_")).collect();
    let expected = ["bias.exp_avg", "bias.exp_avg_sq", "bias.step", "weight.momentum_buffer"];
    assert_eq!(slots, expected.map(|slot| format!("head_{slot}")));
}

/// The state of Adafactor and Muon is near f32's in any format, and the bf16 parameter is its master's.
#[test]
fn whole_matrices_in_half_precision_are_those_of_their_masters() {
    for method in [Method::from(Adafactor::new(0.02)), Muon::new(0.02).into()] {
        let half = numbers_there(&[12, 20], 3).to_kind(Kind::BFloat16).set_requires_grad(true);
        let full = half.detach().to_kind(Kind::Float).set_requires_grad(true);
        let mut opts = [&half, &full].map(|tensor| {
            let named = vec![("w".to_owned(), tensor.shallow_clone())];
            Optimizer::for_named(named, method).expect("an optimizer")
        });
        for step in 0..20 {
            let gradient = numbers_there(&[12, 20], step).to_kind(Kind::BFloat16);
            for (tensor, opt) in [&half, &full].into_iter().zip(&mut opts) {
                let gradient = gradient.to_kind(tensor.kind());
                set_gradient(&mut tensor.shallow_clone(), Some(&gradient)).expect("a gradient");
                opt.step().expect("a step");
            }
        }
        let difference = (master_of(&half, &opts[0]) - full).abs().max().double_value(&[]);
        // Adafactor reads a bf16 parameter's size from the parameter itself.
        assert!(difference < 1e-4, "{method:?}: {difference:e}");
    }
}

/// Returns a bf16 parameter's master: its bits and those of the optimizer's remainder.
fn master_of(parameter: &Tensor, opt: &Optimizer) -> Tensor {
    let (state, _) = opt.state().expect("a state");
    let remainder = state.iter().find(|(name, _)| name.ends_with(".remainder"));
    let remainder = remainder.expect("a remainder").1.to_kind(Kind::Int);
    (parameter.detach().to_kind(Kind::Float).view_dtype(Kind::Int) + remainder)
        .view_dtype(Kind::Float)
}

#[test]
fn a_bf16_parameter_is_updated_as_its_f32_master_to_the_last_bit() {
    let methods: [Method; 5] = [
        AdamW::new(1e-3).weight_decay(0.1).into(),
        Adam::new(1e-3).weight_decay(0.1).amsgrad(true).into(),
        Sgd::new(0.05).momentum(0.9).nesterov(true).weight_decay(0.01).into(),
        Sgd::new(0.05).into(),
        AdamW::new(1e-3).state_format(StateFormat::EightBit).into(),
    ];
    for method in methods {
        let half = numbers_there(&[13, 37], 3).to_kind(Kind::BFloat16).set_requires_grad(true);
        let full = half.detach().to_kind(Kind::Float).set_requires_grad(true);
        let mut opts = [&half, &full].map(|tensor| {
            let named = vec![("w".to_owned(), tensor.shallow_clone())];
            Optimizer::for_named(named, method).expect("an optimizer")
        });
        for step in 0..1000 {
            let gradient = numbers_there(&[13, 37], step).to_kind(Kind::BFloat16);
            for (tensor, opt) in [&half, &full].into_iter().zip(&mut opts) {
                let gradient = gradient.to_kind(tensor.kind());
                set_gradient(&mut tensor.shallow_clone(), Some(&gradient)).expect("a gradient");
                opt.step().expect("a step");
            }
        }
        assert!(master_of(&half, &opts[0]).equal(&full), "{method:?}");
        let moved = (full - numbers_there(&[13, 37], 3)).abs().max().double_value(&[]);
        assert!(moved > 0.01, "{method:?}: {moved}");
    }
}

#[test]
fn a_state_of_an_earlier_version_with_f32_masters_is_read() {
    let trained = || {
        let vs = store(Kind::BFloat16);
        let mut opt = Optimizer::new(&vs, AdamW::new(0.02)).expect("an optimizer");
        train(&vs, &mut opt, 0..3);
        (vs, opt)
    };
    let (vs, opt) = trained();
    let (tensors, metadata) = opt.state().expect("a state");
    let old: Vec<_> = (tensors.into_iter())
        .map(|(name, tensor)| match name.strip_suffix(".remainder") {
            Some(parameter) => {
                let weight = get(&vs, parameter).detach().to_kind(Kind::Float);
                let bits = weight.view_dtype(Kind::Int) + tensor.to_kind(Kind::Int);
                (format!("{parameter}.master"), bits.view_dtype(Kind::Float))
            }
            None => (name, tensor.copy()),
        })
        .collect();
    let options = r#"{"method":"adamw","learning_rate":0.02,"betas":[0.9,0.999],"eps":1e-8,
        "weight_decay":0.01,"amsgrad":false,"half_state":false}"#;
    let metadata: Metadata = (metadata.into_iter())
        .map(|(key, text)| match &*key {
            "group.default" => (key, options.to_owned()),
            _ => (key, text),
        })
        .collect();
    let (second, mut resumed) = trained();
    train(&second, &mut resumed, 7..9);
    set_values(&second, &variables(&vs));
    resumed.load_state(&old, &metadata).expect("an earlier state");
    let (undisturbed, mut opt) = trained();
    for (vs, opt) in [(&undisturbed, &mut opt), (&second, &mut resumed)] {
        train(vs, opt, 3..6);
    }
    assert_eq!(difference(&undisturbed, &second), 0.0);
}

/// Returns the final loss of a noisy least-squares problem whose features have different sizes.
fn noisy_loss(kind: Kind, format: StateFormat) -> f64 {
    let there = |tensor: Tensor| tensor.to_device(test_device());
    tch::manual_seed(1);
    let sizes = there(Tensor::randn([1, 64], (Kind::Float, Device::Cpu)).exp());
    let truth = there(Tensor::randn([64, 32], (Kind::Float, Device::Cpu)));
    let weight = truth.zeros_like().to_kind(kind).set_requires_grad(true);
    let named = vec![("w".to_owned(), weight.shallow_clone())];
    let config = AdamW::new(0.0).weight_decay(0.0).state_format(format);
    let mut opt = Optimizer::for_named(named, config).expect("an optimizer");
    const STEPS: i64 = 600;
    let mut last = 0.0;
    for step in 0..STEPS {
        opt.set_learning_rate(0.02 * (1.0 - step as f64 / STEPS as f64)).expect("a rate");
        let x = there(Tensor::randn([32, 64], (Kind::Float, Device::Cpu))) * &sizes;
        let noise = there(Tensor::randn([32, 32], (Kind::Float, Device::Cpu)));
        let loss = (x.matmul(&weight.to_kind(Kind::Float)) - x.matmul(&truth) - noise).square();
        let loss = loss.mean(Kind::Float);
        loss.backward();
        opt.update();
        last += if step >= STEPS - 50 { loss.double_value(&[]) / 50.0 } else { 0.0 };
    }
    last
}

#[test]
fn a_state_in_fewer_bits_trains_as_well() {
    let full = noisy_loss(Kind::Float, StateFormat::F32);
    for format in [StateFormat::Bf16, StateFormat::EightBit] {
        for kind in [Kind::Float, Kind::BFloat16] {
            let loss = noisy_loss(kind, format);
            assert!((loss / full - 1.0).abs() < 0.03, "{format:?} in {kind:?}: {loss}, not {full}");
        }
    }
}

#[test]
fn a_state_has_the_bytes_that_its_format_says() {
    for (kind, format, bytes) in [
        (Kind::Float, StateFormat::F32, 8.0),
        (Kind::Float, StateFormat::EightBit, 2.0625),
        (Kind::BFloat16, StateFormat::F32, 10.0),
        (Kind::BFloat16, StateFormat::Bf16, 6.0),
        (Kind::BFloat16, StateFormat::EightBit, 4.0625),
        (Kind::Half, StateFormat::F32, 12.0),
    ] {
        let tensor = Tensor::ones([1 << 10], (kind, test_device())).set_requires_grad(true);
        set_gradient(&mut tensor.shallow_clone(), Some(&tensor.detach())).expect("a gradient");
        let method = Method::from(AdamW::new(0.1).state_format(format));
        let named = vec![("w".to_owned(), tensor.shallow_clone())];
        let mut opt = Optimizer::for_named(named, method).expect("an optimizer");
        opt.step().expect("a step");
        let taken = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let (state, _) = opt.state().expect("a state");
        let taken: usize = state.iter().map(|(_, tensor)| taken(tensor)).sum::<usize>() - 4;
        let number = kind.elt_size_in_bytes() as f64;
        assert_eq!(taken as f64 / 1024.0, bytes, "{kind:?} {format:?}");
        assert_eq!(method.state_factor_in(kind) * number, bytes, "{kind:?} {format:?}");
    }
}

#[test]
fn a_half_parameter_that_is_set_by_hand_goes_on_from_there() {
    let vs = store(Kind::BFloat16);
    let mut opt = Optimizer::new(&vs, Sgd::new(0.5)).expect("an optimizer");
    train(&vs, &mut opt, 0..2);
    set(&vs, "scale", &Tensor::from(100.0));
    backward_of(&vs, 3, &["scale"]);
    let expected = 100.0 - 0.5 * get(&vs, "scale").grad().double_value(&[]);
    opt.step().expect("a step");
    assert!((get(&vs, "scale").double_value(&[]) - expected).abs() < 0.5);
}

/// The master weights are refreshed in place; the rest of the state is unchanged.
#[test]
fn a_step_after_parameters_were_set_or_loaded_makes_no_second_state() {
    if test_device() != Device::Cpu {
        return;
    }
    const SIDE: i64 = 256;
    let half = (Kind::BFloat16, Device::Cpu);
    let new = |at: i64| (at.to_string(), Tensor::ones([SIDE, SIDE], half).set_requires_grad(true));
    let mut named: Named = (0..4).map(new).collect();
    for (_, parameter) in &mut named {
        let gradient = Tensor::ones([SIDE, SIDE], half);
        set_gradient(parameter, Some(&gradient)).expect("a gradient");
    }
    let arena = Arena::new("optimizer");
    let _inside = arena.enter();
    let mut opt = Optimizer::for_named(handles(&named), AdamW::new(0.1)).expect("one");
    opt.step().expect("a first step");
    let state = arena.current();
    let most_of_step = |opt: &mut Optimizer| {
        arena.reset_peak();
        opt.step().expect("a step");
        assert_eq!(arena.current(), state, "nothing is left behind");
        arena.peak() - state
    };
    let usual = most_of_step(&mut opt);
    for (_, parameter) in &named {
        let _ = tch::no_grad(|| parameter.shallow_clone().fill_(0.5));
    }
    let after_set = most_of_step(&mut opt);
    let (tensors, metadata) = opt.state().expect("a state");
    opt.load_state(&tensors, &metadata).expect("loaded");
    drop(tensors);
    let after_load = most_of_step(&mut opt);
    // Scratch memory of one parameter: rounded, in f32, and the mask of changes.
    let scratch = (SIDE * SIDE) as u64 * (2 + 4 + 1);
    let most = after_set.max(after_load);
    assert!(most <= usual + scratch, "{most} bytes beside a state of {state}, not {usual}");
}

fn handles(named: &[(String, Tensor)]) -> Named {
    named.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
}

#[test]
fn a_model_that_changes_its_kind_keeps_its_state() {
    let mut vs = store(Kind::Double);
    let mut opt = Optimizer::new(&vs, Adam::new(0.02)).expect("an optimizer");
    train(&vs, &mut opt, 0..2);
    vs.set_kind(Kind::Float);
    opt.zero_grad().expect("zeroed");
    train(&vs, &mut opt, 2..3);
    vs.set_kind(Kind::BFloat16);
    opt.zero_grad().expect("zeroed");
    train(&vs, &mut opt, 3..4);
    let (tensors, _) = opt.state().expect("a state");
    let (_, step) = tensors.iter().find(|(name, _)| name == "conv_bias.step").expect("a count");
    assert_eq!(step.double_value(&[]), 4.0);
}

#[test]
fn clipping_scales_all_gradients_by_one_factor() {
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
        let vs = store(kind);
        backward_of(&vs, 0, &["conv_bias", "head_weight"]);
        let gradients = || {
            let of = |name| get(&vs, name).grad().to_kind(Kind::Double).reshape([-1]);
            Tensor::cat(&[of("conv_bias"), of("head_weight")], 0)
        };
        let before = gradients();
        let true_norm = before.norm().double_value(&[]);
        let variables = vs.trainable_variables();
        let norm = clip_gradient_norm(&variables, 1e6).expect("a norm");
        assert_eq!((norm.tensor().dim(), norm.tensor().device()), (0, test_device()));
        assert!((norm.value().expect("a number") / true_norm - 1.0).abs() < 1e-6);
        assert_eq!(gradients(), before, "below the bound nothing is changed");
        clip_gradient_norm(&variables, 0.5).expect("a norm");
        let bound = if kind == Kind::BFloat16 { 1e-2 } else { 1e-5 };
        assert!((gradients() - before * (0.5 / true_norm)).abs().max().double_value(&[]) < bound);
    }
}

#[test]
fn tchs_optimizers_and_ours_share_a_model() {
    let vs = store(Kind::Double);
    let other = store(Kind::Double);
    let mut tchs = nn::Sgd::default().build(&vs, 0.1).expect("tch's optimizer");
    let mut ours = Optimizer::new(&vs, Sgd::new(0.1)).expect("an optimizer");
    let mut all_ours = Optimizer::new(&other, Sgd::new(0.1)).expect("an optimizer");
    for step in 0..6 {
        backward(&vs, step);
        ours.clip_gradient_norm(3.0).expect("a norm");
        if step % 2 == 0 {
            tchs.step()
        } else {
            ours.step().expect("a step")
        }
        if step % 3 == 0 {
            tchs.zero_grad()
        } else {
            ours.zero_grad().expect("zeroed")
        }
        backward(&other, step);
        all_ours.clip_gradient_norm(3.0).expect("a norm");
        all_ours.update();
    }
    assert!(difference(&vs, &other) < 1e-14);
}

#[test]
fn options_that_make_no_sense_are_refused_with_the_numbers() {
    let vs = store(Kind::Double);
    let cases: [(Method, &str); 16] = [
        (Sgd::new(-0.1).into(), "learning rate cannot be -0.1: give a finite number of at least 0"),
        (Sgd::new(f64::NAN).into(), "learning rate cannot be NaN"),
        (Adam::new(f64::INFINITY).into(), "learning rate cannot be inf"),
        (Sgd::new(0.1).momentum(-1.0).into(), "momentum cannot be -1"),
        (Sgd::new(0.1).weight_decay(-1.0).into(), "weight decay cannot be -1"),
        (Sgd::new(0.1).dampening(f64::NAN).into(), "dampening cannot be NaN: give a finite number"),
        (Sgd::new(0.1).nesterov(true).into(), "nesterov cannot be on with momentum 0, dampening 0"),
        (
            Adam::new(0.1).betas(1.0, 0.9).into(),
            "betas cannot be (1, 0.9): give two numbers of at least 0 and below 1",
        ),
        (AdamW::new(0.1).betas(0.9, f64::NAN).into(), "betas cannot be (0.9, NaN)"),
        (AdamW::new(0.1).betas(-0.1, 0.9).into(), "betas cannot be (-0.1, 0.9)"),
        (AdamW::new(0.1).eps(-1.0).into(), "eps cannot be -1"),
        (AdamW::new(0.1).weight_decay(f64::NAN).into(), "weight decay cannot be NaN"),
        (Muon::new(0.1).momentum(1.0).into(), "momentum cannot be 1: give a number of at least 0"),
        (
            Muon::new(0.1).iteration(100, [1.0; 3]).into(),
            "iteration cannot be 100 steps with [1.0, 1.0, 1.0]: give fewer than 100 steps",
        ),
        (Adafactor::new(0.1).threshold(0.5).into(), "threshold cannot be 0.5: give a number of"),
        (Adafactor::new(0.1).beta2_decay(0.1).into(), "beta2 decay cannot be 0.1"),
    ];
    let mut opt = Optimizer::new(&vs, Sgd::new(0.1)).expect("an optimizer");
    for (config, words) in cases {
        let error = Optimizer::new(&vs, config).expect_err(words).to_string();
        assert!(error.starts_with(words), "{error}");
        assert!(opt.group("g", |_| true, config).is_err());
    }
    assert!(opt.set_learning_rate(-1.0).is_err() && opt.learning_rate() == 0.1);
    assert!(opt.set_group_learning_rate("default", f64::NAN).is_err());
    for bad in [0.0, -1.0, f64::NAN] {
        let error = opt.clip_gradient_norm(bad).expect_err("a bad bound").to_string();
        assert_eq!(error, format!("max_norm cannot be {bad}: give a number above 0"));
    }
    let none = opt.clip_gradient_norm(1.0).expect_err("no gradient");
    assert_eq!(none, Error::Optim(OptimError::NoGradient { parameters: 5 }));
}

#[test]
fn groups_and_parameters_that_make_no_sense_are_refused() {
    let vs = store(Kind::Double);
    let mut opt = Optimizer::new(&vs, Sgd::new(0.1)).expect("an optimizer");
    let refused = |opt: &mut Optimizer, name: &str, end: &'static str, words: &str| {
        assert_fails(opt.group(name, |n| n.ends_with(end), Sgd::new(0.1)), &[words]);
    };
    let empty = "group 'none' matches none of the 5 parameters (the first is 'conv_bias')";
    let error = opt.group("none", |name| name.ends_with("embedding"), Sgd::new(0.1));
    let error = error.expect_err("nobody").to_string();
    assert!(error.starts_with(empty), "{error}");
    opt.group("bias", |name| name.ends_with("bias"), Sgd::new(0.1)).expect("a group");
    refused(&mut opt, "bias", "weight", "there is one of that name");
    refused(&mut opt, "head", "head_bias", "'head_bias' is in group 'bias'");
    let unknown = opt.set_group_learning_rate("head", 0.1).expect_err("no group").to_string();
    assert_eq!(unknown, "there is no group 'head'; there is default, bias");
    backward(&vs, 0);
    opt.step().expect("a step");
    refused(&mut opt, "weight", "weight", "a step was taken already");

    let undefined = || vec![("a".to_owned(), Tensor::new())];
    assert_fails(Optimizer::for_named(undefined(), Sgd::new(0.1)), &["undefined"]);
    assert_fails(Ema::for_named(undefined(), 0.5), &["undefined"]);
    let leaf = || Tensor::ones([2], (Kind::Float, test_device())).set_requires_grad(true);
    let tied = leaf();
    let expanded = leaf().detach().reshape([2, 1]).expand([2, 3], false);
    for (named, words) in [
        (vec![("a", leaf()), ("a", leaf())], "two have that name"),
        (
            vec![("a", tied.shallow_clone()), ("b", tied)],
            "'b' cannot be optimized: it is the same tensor as 'a'",
        ),
        (vec![("a", leaf() * 2.0)], "it was computed from others"),
        (vec![("a", leaf().detach().to_kind(Kind::Int))], "of kind Int"),
        (vec![("a", expanded)], "its elements share memory"),
    ] {
        let named = named.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        assert_fails(Optimizer::for_named(named, Sgd::new(0.1)), &[words]);
    }
}

/// No matrix beside it lends it scratch memory.
#[test]
fn adafactor_updates_a_vector_alone() {
    let start = Tensor::ones([1000], (Kind::Float, Device::Cpu));
    let mut vector = start.copy().set_requires_grad(true);
    set_gradient(&mut vector, Some(&start)).expect("a gradient");
    let named = vec![("vector".to_owned(), vector.shallow_clone())];
    let mut optimizer = Optimizer::for_named(named, Adafactor::new(0.1)).expect("an optimizer");
    optimizer.step().expect("a step");
    assert_ne!(vector, start);
}
