//! Weight decay for matrices only, in one optimizer and in a pipeline's.

use crate::support::pipeline_cases::{CASES, Plain, piped};
use crate::support::{Update, assert_close, test_device};
use brimful::optim::{AdamW, NO_DECAY_GROUP, OptimError, Optimizer, Sgd};
use brimful::{Error, MicroBatches};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

/// Matrix and vector of ones with zero gradients: only decay changes them.
fn ones_without_gradients() -> VarStore {
    let store = VarStore::new(test_device());
    for (name, shape) in [("weight", &[2, 3][..]), ("bias", &[2]), ("scale", &[])] {
        let ones = store.root().ones(name, shape);
        (ones * 0.0).sum(Kind::Float).backward();
    }
    store
}

fn sum_of(store: &VarStore, name: &str) -> f64 {
    store.variables()[name].mean(Kind::Float).double_value(&[])
}

#[test]
fn only_matrices_shrink() {
    let store = ones_without_gradients();
    let mut optimizer =
        Optimizer::new(&store, Sgd::new(0.5).weight_decay(0.5)).expect("an optimizer");
    optimizer.decay_only_matrices().expect("a group");
    optimizer.step().expect("a step");
    assert_eq!(["weight", "bias", "scale"].map(|name| sum_of(&store, name)), [0.75, 1.0, 1.0]);
    assert_eq!(optimizer.group_learning_rate(NO_DECAY_GROUP).expect("the group"), 0.5);
    let refused = optimizer.decay_only_matrices().expect_err("twice");
    assert!(matches!(refused, Error::Optim(OptimError::BadGroup { .. })), "{refused}");
}

#[test]
fn parameters_of_other_groups_keep_their_decay() {
    let store = ones_without_gradients();
    let config = Sgd::new(0.5).weight_decay(0.5);
    let mut optimizer = Optimizer::new(&store, config).expect("an optimizer");
    optimizer.group("scales", |name| name == "scale", config).expect("a group");
    optimizer.decay_only_matrices().expect("a group");
    optimizer.step().expect("a step");
    assert_eq!(["weight", "bias", "scale"].map(|name| sum_of(&store, name)), [0.75, 1.0, 0.75]);
}

#[test]
fn a_model_of_matrices_alone_has_no_group_without_decay() {
    let matrix = Tensor::ones([2, 2], (Kind::Float, test_device())).set_requires_grad(true);
    let named = vec![("weight".to_owned(), matrix)];
    let mut optimizer = Optimizer::for_named(named, AdamW::new(0.1)).expect("an optimizer");
    optimizer.decay_only_matrices().expect("nothing to do");
    let refused = optimizer.group_learning_rate(NO_DECAY_GROUP).expect_err("no group");
    assert!(matches!(refused, Error::Optim(OptimError::NoGroup { .. })), "{refused}");
}

#[test]
fn a_pipeline_decays_as_one_optimizer_and_reads_its_state() {
    tch::manual_seed(9);
    let config = AdamW::new(0.01).weight_decay(0.3);
    for case in &CASES {
        let layers = (case.layers)();
        let mut pipe = piped(layers.clone(), 3, 2);
        let plain = Plain::of(&layers, &pipe);
        let mut optimizer = pipe.optimizer(config).expect("an optimizer");
        optimizer.decay_only_matrices().expect("a group");
        let mut alone = Optimizer::new(&plain.store, config).expect("an optimizer");
        alone.decay_only_matrices().expect("a group");
        for _ in 0..2 {
            let (x, y) = ((case.input)(6), (case.target)(6));
            let step = pipe.backward(&x, &y, case.loss).expect("a step");
            plain.backward(case, &x, &y, MicroBatches::Count(2), step.seed);
            optimizer.update();
            alone.update();
        }
        assert_close(&pipe.variables().expect("variables"), &plain.values(), case.name);
        let (tensors, metadata) = optimizer.state().expect("a state");
        alone.load_state(&tensors, &metadata).expect("loaded");
        let refused = optimizer.decay_only_matrices().expect_err("steps were taken");
        assert!(matches!(refused, Error::Optim(OptimError::BadGroup { .. })), "{refused}");
    }
}
