//! A no-grad guard that a closure or a layer never drops does not affect later work: gradients are those of the
//! whole mini-batch, and the caller's thread is unchanged.

use crate::support::pipeline_cases::builder;
use crate::support::{
    Named, assert_close, copies, fill, gradients, numbers, numbers_there, test_device,
};
use brimful::layers::Layers;
use brimful::schedule::Recompute;
use brimful::{Loss, MicroBatcher, MicroBatches, Replicas};
use tch::nn::{self, ModuleT, Path, VarStore};
use tch::{Device, Kind, Tensor};

const SAMPLES: i64 = 6;

/// Disables graphs on this thread and never drops the guard.
fn forget_a_guard() {
    std::mem::forget(tch::no_grad_guard());
}

/// Returns whether this thread records graphs.
fn makes_graphs() -> bool {
    let x = Tensor::ones([1], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    (x * 2.0).requires_grad()
}

/// Two layers, the first of which may leave a guard behind.
fn layers(forgets: bool) -> Layers {
    Layers::new()
        .add("hidden", |p| nn::linear(p, 4, 5, Default::default()))
        .add_fn("tanh", move |x| {
            let x = x.tanh();
            if forgets {
                forget_a_guard();
            }
            x
        })
        .add("output", |p| nn::linear(p, 5, 3, Default::default()))
}

fn built(root: &Path<'_>) -> impl ModuleT + use<> {
    layers(false).build(root).expect("a model")
}

fn batch() -> (Tensor, Tensor) {
    (numbers_there(&[SAMPLES, 4], 1), numbers_there(&[SAMPLES, 3], 2))
}

fn loss(out: &Tensor, y: &Tensor) -> Loss {
    Loss::mean((out - y).square().mean(Kind::Double))
}

/// Loss that leaves a guard behind, so that no graph is recorded afterwards.
fn forgetful_loss(out: &Tensor, y: &Tensor) -> Loss {
    let loss = loss(out, y);
    forget_a_guard();
    loss
}

/// Returns a model with fixed values.
fn filled() -> (VarStore, impl ModuleT + use<>) {
    let mut store = VarStore::new(test_device());
    let model = built(&store.root());
    store.double();
    fill(&store);
    (store, model)
}

/// Returns the whole mini-batch's gradients, by autograd alone.
fn expected() -> Named {
    let (store, model) = filled();
    let (x, y) = batch();
    (model.forward_t(&x, true) - y).square().mean(Kind::Double).backward();
    copies(&gradients(&store))
}

#[test]
fn a_closure_s_guard_ends_with_its_micro_batch() {
    let expected = expected();
    let (store, model) = filled();
    for outside in [true, false] {
        let _outside = (!outside).then(tch::no_grad_guard);
        let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
        let run = |(x, y): (Tensor, Tensor)| forgetful_loss(&model.forward_t(&x, true), &y);
        micro.backward(&batch(), run).expect("a step");
        assert_eq!(makes_graphs(), outside);
        assert_close(&gradients(&store), &expected, "a micro-batcher");
        store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        let forward = |(x, _): (Tensor, Tensor)| {
            let out = model.forward_t(&x, true);
            forget_a_guard();
            out
        };
        let whole = |out: &Tensor| {
            let loss = (out - batch().1).square().mean(Kind::Double);
            forget_a_guard();
            loss
        };
        micro.backward_whole(&batch(), forward, whole).expect("a step");
        assert_eq!(makes_graphs(), outside);
        assert_close(&gradients(&store), &expected, "a loss on all outputs");
        store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        let out = micro.map(&batch(), forward).expect("outputs");
        assert!(!out.requires_grad() && makes_graphs() == outside);
    }
}

#[test]
fn a_replica_s_guard_ends_with_its_micro_batch() {
    let expected = expected();
    let devices = [test_device(), test_device()];
    let mut replicas = Replicas::new(devices, MicroBatches::Samples(2), built).expect("replicas");
    replicas.store_mut().double();
    fill(replicas.store());
    for _ in 0..2 {
        let run = |model: &_, (x, y): (Tensor, Tensor)| {
            forgetful_loss(&ModuleT::forward_t(model, &x, true), &y)
        };
        replicas.backward(&batch(), run).expect("a step");
        assert_close(&gradients(replicas.store()), &expected, "replicas");
        replicas.store().trainable_variables().iter_mut().for_each(Tensor::zero_grad);
    }
    assert!(makes_graphs());
}

#[test]
fn a_layer_s_guard_ends_with_its_action() {
    let expected = expected();
    for (forgets, recompute) in
        [(false, Recompute::Never), (true, Recompute::Never), (true, Recompute::Always)]
    {
        let pipe =
            builder(layers(forgets), 2).balance([2, 1]).micro_batches(MicroBatches::Count(3));
        let mut pipe = pipe.recompute(recompute).build().expect("a pipeline");
        let mut values = pipe.variables().expect("variables");
        for (name, value) in &mut values {
            *value = numbers(&value.size(), name.len() as i64);
        }
        pipe.set_variables(values).expect("the model's own");
        for _ in 0..2 {
            let (x, y) = batch();
            pipe.backward(&x, &y, |out: Tensor, y| forgetful_loss(&out, y)).expect("a step");
            assert_close(&pipe.gradients().expect("gradients"), &expected, "a pipeline");
            pipe.zero_grad().expect("no gradients");
            let judged = pipe.evaluate(&x, &y, |out: Tensor, y| (loss(&out, y), out));
            assert!(!judged.expect("a test").outputs.requires_grad());
        }
    }
    assert!(makes_graphs());
}
