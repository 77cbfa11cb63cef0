//! A backward without libtorch's engine, whole or split, gives the engine's gradients of inputs and weights for
//! every graph.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU; then use `--test-threads=1`.

use crate::test_device::test_device;
use brimful_torch::arena::Account;
use brimful_torch::autograd::{self, set_gradient};
use brimful_torch::linear_cross_entropy::{LossHead, linear_cross_entropy};
use brimful_torch::split_backward::SplitBackward;
use tch::nn::{self, RNN};
use tch::{Device, Kind, Tensor};

const OPTIONS: fn() -> (Kind, Device) = || (Kind::Double, test_device());

fn random(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, OPTIONS()) * 0.5
}

fn weight(shape: &[i64]) -> Tensor {
    random(shape).set_requires_grad(true)
}

/// Part of a model: its weights, its inputs, and its forward.
struct Stage<F> {
    weights: Vec<Tensor>,
    inputs: Vec<Tensor>,
    run: F,
}

/// Gradients of the inputs, and of the weights.
type Gradients = [Vec<Option<Tensor>>; 2];

impl<F: Fn(&[Tensor]) -> Vec<Tensor>> Stage<F> {
    /// Returns the outputs that need a gradient, each with one, and the inputs that they were computed from.
    fn forward(&self) -> (Vec<(Tensor, Tensor)>, Vec<Tensor>) {
        let leaf = |x: &Tensor| x.detach().set_requires_grad(x.requires_grad());
        let inputs: Vec<Tensor> = self.inputs.iter().map(leaf).collect();
        tch::manual_seed(5);
        let outputs = (self.run)(&inputs);
        let traced = outputs.into_iter().filter(Tensor::requires_grad);
        let roots = traced.enumerate().map(|(at, output)| {
            let gradient = output.detach().sin() + 0.1 * (at as f64 + 1.0);
            (output, gradient)
        });
        (roots.collect(), inputs)
    }

    /// Runs tch's backward, which is libtorch's own.
    fn expected(&self) -> Gradients {
        let (roots, inputs) = self.forward();
        let terms = roots.iter().map(|(root, gradient)| (root * gradient).sum(Kind::Double));
        terms.reduce(|sum, term| sum + term).expect("a root").backward();
        [gradients_of(&inputs), taken(&self.weights)]
    }

    fn whole(&self) -> Gradients {
        let (roots, inputs) = self.forward();
        let (roots, gradients): (Vec<_>, Vec<_>) = roots.iter().map(|(r, g)| (r, Some(g))).unzip();
        autograd::backward(&roots, &gradients, false).expect("a backward");
        [gradients_of(&inputs), taken(&self.weights)]
    }

    fn split(&self) -> (Gradients, Option<String>) {
        let (roots, inputs) = self.forward();
        let (mut gradients, mut split) =
            SplitBackward::input_gradients(&[roots], &inputs).expect("input gradients");
        assert!(taken(&self.weights).iter().all(Option::is_none), "only the weight half adds");
        assert!(gradients_of(&inputs).iter().all(Option::is_none), "inputs' are given, not added");
        split.add_weight_gradients(0).expect("weight gradients");
        ([gradients.remove(0), taken(&self.weights)], split.run_whole())
    }

    /// Runs a split backward that returns the weight gradients without adding them.
    fn apart(&self) -> Gradients {
        let (roots, inputs) = self.forward();
        let (mut gradients, mut split) =
            SplitBackward::input_gradients(&[roots], &inputs).expect("input gradients");
        let weights = split.weight_gradients(0, &self.weights).expect("weight gradients");
        assert!(taken(&self.weights).iter().all(Option::is_none), "nobody's are added to");
        [gradients.remove(0), weights]
    }

    fn check(&self, what: &str) {
        let expected = self.expected();
        let check = || {
            assert_same(&self.whole(), &expected, what);
            let (split, unknown) = self.split();
            assert_same(&split, &expected, what);
            assert_eq!(unknown, None, "{what}");
            assert_same(&self.apart(), &expected, what);
        };
        check();
        autograd::by_engine(check);
    }
}

fn gradients_of(tensors: &[Tensor]) -> Vec<Option<Tensor>> {
    let gradient = |tensor: &Tensor| Some(tensor.grad()).filter(Tensor::defined);
    tensors.iter().map(gradient).collect()
}

/// Returns the weights' gradients and removes them.
fn taken(weights: &[Tensor]) -> Vec<Option<Tensor>> {
    let gradients = gradients_of(weights);
    for weight in weights {
        set_gradient(&mut weight.shallow_clone(), None).expect("taken");
    }
    gradients
}

fn assert_same(got: &Gradients, expected: &Gradients, what: &str) {
    for (got, expected) in got.iter().zip(expected) {
        for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
            match (got, expected) {
                (Some(got), Some(expected)) => {
                    let off = (got - expected).abs().max().double_value(&[]);
                    assert!(off < 1e-12, "{what}: number {at} is off by {off}");
                }
                (None, None) => {}
                _ => panic!("{what}: number {at} is {got:?}, not {expected:?}"),
            }
        }
    }
}

fn input(shape: &[i64]) -> Vec<Tensor> {
    vec![random(shape).set_requires_grad(true)]
}

fn copies(tensors: &[&Tensor]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.shallow_clone()).collect()
}

#[test]
fn tied_weights_at_several_depths_are_counted_as_often_as_they_are_used() {
    let (w, v, b) = (weight(&[6, 6]), weight(&[6, 6]), weight(&[6]));
    let run = |x: &[Tensor]| {
        let x = &x[0] + x[0].linear(&w, Some(&b)).tanh();
        let x = &x + x.matmul(&v).tanh();
        let x = &x + x.linear(&w, Some(&b)).tanh();
        vec![x.matmul(&w.tr())]
    };
    Stage { weights: copies(&[&w, &v, &b]), inputs: input(&[4, 6]), run }.check("tied");
}

#[test]
fn a_table_that_is_the_head_too() {
    let (table, w) = (weight(&[9, 6]), weight(&[6, 6]));
    let numbers = Tensor::randint(9, [4, 5], (Kind::Int64, test_device()));
    let run = |x: &[Tensor]| {
        let hidden = &x[0] + Tensor::embedding(&table, &numbers, -1, false, false);
        vec![hidden.matmul(&w).tanh().matmul(&table.tr())]
    };
    Stage { weights: copies(&[&table, &w]), inputs: input(&[4, 5, 6]), run }.check("a table");
}

#[test]
fn weights_made_from_weights_and_from_inputs() {
    let (w, g) = (weight(&[6, 6]), weight(&[6, 1]));
    let normed = |x: &[Tensor]| {
        let weight = &g * &w / w.square().sum_dim_intlist([1i64].as_slice(), true, None).sqrt();
        let hidden = x[0].matmul(&weight).tanh();
        vec![(&hidden * &x[1]).matmul(&weight), weight.sum(Kind::Double), &x[1] * 2.0]
    };
    let inputs: Vec<Tensor> = [input(&[4, 6]), input(&[4, 6])].into_iter().flatten().collect();
    Stage { weights: copies(&[&w, &g]), inputs, run: normed }.check("normed");
    let mixed = |x: &[Tensor]| {
        let u = x[0].tr().matmul(&x[0]) + &w;
        let q = u.matmul(&w);
        vec![x[0].matmul(&q).matmul(&u).matmul(&(w.tr() + q))]
    };
    Stage { weights: copies(&[&w]), inputs: input(&[4, 6]), run: mixed }.check("mixed");
}

#[test]
fn recurrent_layers() {
    let store = nn::VarStore::new(test_device());
    let lstm = nn::lstm(store.root() / "lstm", 5, 6, Default::default());
    let gru = nn::gru(store.root() / "gru", 6, 6, Default::default());
    for variable in store.variables().values() {
        variable.shallow_clone().set_data(&variable.to_kind(Kind::Double));
    }
    let run = |x: &[Tensor]| {
        let zero = || Tensor::zeros([1, 3, 6], OPTIONS());
        let state = nn::LSTMState((zero(), zero()));
        let (hidden, _) = lstm.seq_init(&x[0], &state);
        vec![gru.seq_init(&hidden, &nn::GRUState(zero())).0]
    };
    Stage { weights: store.trainable_variables(), inputs: input(&[3, 4, 5]), run }
        .check("recurrent");
}

#[test]
fn norms_and_convolutions() {
    let (w, g, b) = (weight(&[6, 4, 3, 3]), weight(&[6]), weight(&[6]));
    let run = |x: &[Tensor]| {
        let x = x[0].conv2d(&w, None::<&Tensor>, 1, 1, 1, 1);
        let x = x.batch_norm(
            Some(&g),
            Some(&b),
            None::<&Tensor>,
            None::<&Tensor>,
            true,
            0.1,
            1e-5,
            false,
        );
        let x = x.relu().group_norm(2, Some(&g), Some(&b), 1e-5, false);
        vec![x.permute([0, 2, 3, 1]).contiguous().layer_norm([6], Some(&g), Some(&b), 1e-5, false)]
    };
    Stage { weights: copies(&[&w, &g, &b]), inputs: input(&[2, 4, 5, 5]), run }.check("norms");
}

#[test]
fn work_in_place_on_views() {
    let (w, v, u) = (weight(&[8, 8]), weight(&[4]), weight(&[3, 4]));
    let run = |x: &[Tensor]| {
        let y = x[0].copy();
        let mut left = y.narrow(1, 0, 4);
        let _ = left.g_mul_(&v);
        y.narrow(1, 4, 4).copy_(&u);
        let y = y.matmul(&w);
        let _ = y.narrow(1, 0, 4).g_mul_(&v);
        vec![y.tanh(), left]
    };
    Stage { weights: copies(&[&w, &v, &u]), inputs: input(&[3, 8]), run }.check("views of inputs");
    let base = weight(&[3, 8]);
    let run = |x: &[Tensor]| {
        let y = &base * 1.0;
        let _ = y.narrow(1, 0, 4).g_mul_(&x[0]);
        let y = y.matmul(&w);
        let _ = y.narrow(1, 0, 4).g_add_(&x[0]);
        vec![y]
    };
    Stage { weights: copies(&[&base, &w]), inputs: input(&[3, 4]), run }.check("views of weights");
}

#[test]
fn outputs_of_every_sort() {
    let (b, w, unused) = (weight(&[4, 6]), weight(&[6, 6]), weight(&[2]));
    let run = |x: &[Tensor]| {
        let parts = x[0].matmul(&w).chunk(3, 1);
        let number = x[0].argmax(1, false);
        let plain = x[0].shallow_clone();
        vec![&parts[0] * &parts[2], &b * 1.0, plain, b.shallow_clone(), number, x[0].detach()]
    };
    let weights = copies(&[&b, &w, &unused]);
    Stage { weights, inputs: input(&[4, 6]), run }.check("outputs");
    let nothing = |x: &[Tensor]| vec![x[0].shallow_clone()];
    Stage { weights: vec![], inputs: input(&[4, 6]), run: nothing }.check("the input itself");
}

#[test]
fn frozen_weights_and_inputs_without_a_gradient() {
    let (w, v) = (weight(&[6, 6]), weight(&[6, 6]));
    let frozen = random(&[6, 6]);
    let run = |x: &[Tensor]| vec![x[0].matmul(&w).tanh().matmul(&frozen).tanh().matmul(&v)];
    let first = Stage { weights: copies(&[&w, &v]), inputs: vec![random(&[4, 6])], run };
    first.check("the first stage");
    Stage { inputs: input(&[4, 6]), ..first }.check("one frozen");
    let run = |x: &[Tensor]| vec![x[0].matmul(&frozen).tanh()];
    Stage { weights: copies(&[&w]), inputs: input(&[4, 6]), run }.check("all frozen");
}

#[test]
fn a_function_of_our_own_runs_whole() {
    let (w, head) = (weight(&[6, 6]), weight(&[9, 6]));
    let targets = Tensor::randint(9, [4], (Kind::Int64, test_device()));
    let run = |x: &[Tensor]| {
        let head = LossHead {
            weight: &head,
            bias: None,
            class_weights: None,
            smoothing: 0.0,
            ignored: -100,
            chunk_bytes: 1 << 20,
        };
        let hidden = x[0].matmul(&w).tanh();
        vec![linear_cross_entropy(&hidden, &targets, head).expect("a loss").sum]
    };
    Stage { weights: copies(&[&w, &head]), inputs: input(&[4, 6]), run }.check("a loss of our own");
}

#[test]
fn each_group_of_roots_has_gradients_of_its_own() {
    check_groups();
    autograd::by_engine(check_groups);
}

fn check_groups() {
    let (w, v) = (weight(&[6, 6]), weight(&[6, 6]));
    let run = |x: &[Tensor]| {
        let hidden = x[0].matmul(&w).tanh();
        vec![hidden.matmul(&v), hidden.square(), w.square().sum(Kind::Double)]
    };
    let stage = Stage { weights: copies(&[&w, &v]), inputs: input(&[4, 6]), run };
    let (roots, inputs) = stage.forward();
    let groups: Vec<_> = roots.into_iter().map(|root| vec![root]).chain([vec![]]).collect();
    let (given, mut split) =
        SplitBackward::input_gradients(&groups, &inputs).expect("input gradients");
    for (group, given) in given.into_iter().enumerate() {
        split.add_weight_gradients(group).expect("weight gradients");
        let got = [given, taken(&stage.weights)];
        let (mut roots, inputs) = stage.forward();
        if group == 3 {
            assert!(got.iter().flatten().all(Option::is_none), "of no root there is nothing");
            continue;
        }
        let (root, gradient) = roots.swap_remove(group);
        autograd::backward(&[&root], &[Some(&gradient)], false).expect("a backward");
        let expected = [gradients_of(&inputs), taken(&stage.weights)];
        assert_same(&got, &expected, &format!("group {group}"));
    }
    assert!(split.add_weight_gradients(4).is_err(), "there are four groups");
}

#[test]
fn what_is_given_is_nobody_elses() {
    let b = weight(&[4, 6]);
    let inputs: Vec<Tensor> = [input(&[4, 6]), input(&[4, 6])].into_iter().flatten().collect();
    let root = &inputs[0] + &inputs[1] + &b;
    let gradient = random(&[4, 6]);
    let groups = [vec![(root, gradient.shallow_clone())]];
    let (given, mut split) =
        SplitBackward::input_gradients(&groups, &inputs).expect("input gradients");
    let mut places = vec![gradient.data_ptr()];
    places.extend(given[0].iter().flatten().map(Tensor::data_ptr));
    split.add_weight_gradients(0).expect("weight gradients");
    places.push(b.grad().data_ptr());
    let distinct: std::collections::HashSet<_> = places.iter().collect();
    assert_eq!(distinct.len(), 4, "{places:?}");
}

/// Returns the bytes in use on the CPU after the forward, after the input part, and after the weight part.
fn in_use(layers: usize) -> [u64; 3] {
    const SIZE: i64 = 1 << 16;
    let arena = Account::new("split");
    let _charged = arena.enter();
    let options = (Kind::Double, Device::Cpu);
    let scale = Tensor::ones([1], options).set_requires_grad(true);
    let input = Tensor::ones([SIZE], options).set_requires_grad(true);
    let before = arena.current();
    // Only the input part needs what tanh saves; only the weight part needs the scale's factor.
    let output = (0..layers).fold(&input * &scale, |x, _| x.tanh());
    let after_forward = arena.current() - before;
    let groups = [vec![(output, Tensor::ones([SIZE], options))]];
    let (given, mut split) =
        SplitBackward::input_gradients(&groups, &[input]).expect("input gradients");
    drop(given);
    let after_inputs = arena.current() - before;
    split.add_weight_gradients(0).expect("weight gradients");
    [after_forward, after_inputs, arena.current() - before].map(|bytes| bytes / (8 * SIZE as u64))
}

#[test]
fn the_input_gradients_let_go_of_all_that_it_alone_needs() {
    // The test holds the root and its gradient; between the two parts one more gradient is kept.
    assert_eq!(in_use(4), [4, 3, 2]);
    assert_eq!(autograd::by_engine(|| in_use(4)), [4, 3, 2]);
}

/// Returns the peak memory of a backward, in tensors of a layer.
fn peak_of_backward() -> u64 {
    const SIZE: i64 = 1 << 16;
    let arena = Account::new("peak");
    let _charged = arena.enter();
    let options = (Kind::Double, Device::Cpu);
    let input = Tensor::ones([SIZE], options).set_requires_grad(true);
    // Each value is used twice, so its gradient comes in two parts.
    let output = (0..6).fold(&input * 0.5, |x, _| x.tanh() + x.sigmoid());
    let gradient = Tensor::ones([SIZE], options);
    arena.reset_peak();
    autograd::backward(&[&output], &[Some(&gradient)], false).expect("a backward");
    arena.peak() / (8 * SIZE as u64)
}

#[test]
fn a_backward_holds_no_more_than_the_engines() {
    assert_eq!(peak_of_backward(), autograd::by_engine(peak_of_backward));
}

#[test]
fn a_backward_that_fails_leaves_what_it_was_given() {
    let w = weight(&[6, 6]);
    let hidden = input(&[4, 6]).remove(0).matmul(&w).tanh();
    let root = hidden.square();
    let gradient = random(&[4, 6]);
    let before = gradient.copy();
    let _ = hidden.detach().fill_(1.0);
    let error =
        autograd::backward(&[&root], &[Some(&gradient)], false).expect_err("it was changed");
    assert!(error.to_string().contains("modified by an inplace operation"), "{error}");
    assert!(gradient.equal(&before));
    assert!(!w.grad().defined());
}

#[test]
fn a_sparse_gradient_and_a_dense_one_meet_in_either_order() {
    let numbers = Tensor::randint(9, [4, 5], (Kind::Int64, test_device()));
    for dense_first in [false, true] {
        let table = weight(&[9, 6]);
        // A node between the leaf and its uses, at which gradients accumulate.
        let scaled = table.view([9, 6]);
        let found = || Tensor::embedding(&scaled, &numbers, -1, false, false).square();
        let (a, b) = match dense_first {
            true => (scaled.matmul(&scaled.tr()), found()),
            false => (found(), scaled.matmul(&scaled.tr())),
        };
        let root = a.sum(Kind::Double) + b.sum(Kind::Double);
        autograd::backward(&[&root], &[None], true).expect("a backward");
        let found = table.grad().copy();
        set_gradient(&mut table.shallow_clone(), None).expect("taken");
        root.backward();
        assert!((found - table.grad()).abs().max().double_value(&[]) < 1e-12);
    }
}
