//! Sparse gradients are refused by name before anything changes, in every engine.

use crate::support::{Named, copies, gradients, test_device};
use brimful::{DeviceSpec, Error, Layers, Loss, MicroBatcher, MicroBatches, Pipeline, Replicas};
use brimful_torch::autograd::set_gradient;
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

const WORDS: i64 = 7;
const WIDTH: i64 = 3;

fn table(root: &nn::Path) -> nn::Embedding {
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    nn::embedding(root, WORDS, WIDTH, config)
}

/// Layer that is committed before the table, the table, and a layer after it.
fn net(root: &nn::Path) -> nn::SequentialT {
    let linear = |name| nn::linear(root / name, WIDTH, WIDTH, Default::default());
    let (before, after) = (linear("a"), linear("c"));
    nn::seq_t().add(table(&(root / "b"))).add(before).add(after)
}

fn words() -> Tensor {
    Tensor::arange(8, (Kind::Int64, Device::Cpu)).remainder(WORDS)
}

fn loss(net: &nn::SequentialT, x: &Tensor) -> Loss {
    Loss::mean(net.forward_t(x, true).square().mean(Kind::Float))
}

/// Sets gradients that must still be there after the step.
fn with_gradients(store: &nn::VarStore) -> Named {
    for mut variable in store.trainable_variables() {
        let ones = variable.ones_like();
        set_gradient(&mut variable, Some(&ones)).expect("a gradient");
    }
    copies(&gradients(store))
}

fn refused(error: &Error) {
    let error = error.to_string();
    assert!(error.contains("'b.weight'") && error.contains("sparse: false"), "{error}");
}

#[test]
fn one_device_refuses_them_by_name() {
    let store = nn::VarStore::new(test_device());
    let model = net(&store.root());
    let before = with_gradients(&store);
    for size in [MicroBatches::Samples(3), MicroBatches::Count(1)] {
        let mut micro = MicroBatcher::new(&store, size);
        refused(&micro.backward(&words(), |x| loss(&model, &x)).expect_err("sparse"));
        let (forward, weigh) =
            (|x| model.forward_t(&x, true), |out: &Tensor| out.square().mean(Kind::Float));
        refused(&micro.backward_whole(&words(), forward, weigh).expect_err("sparse"));
        refused(&micro.accumulate(&words(), |x| loss(&model, &x)).expect_err("sparse"));
        assert_eq!(gradients(&store), before);
    }
}

/// A gradient from the user's own backward.
#[test]
fn one_that_is_there_already_is_refused_too() {
    let store = nn::VarStore::new(test_device());
    let (table, linear) = (table(&(store.root() / "b")), {
        let root = store.root() / "a";
        nn::linear(root, WIDTH, WIDTH, Default::default())
    });
    let x = words().to_device(test_device());
    linear.forward(&table.forward(&x)).square().mean(Kind::Float).backward();
    let before = linear.ws.grad().copy();
    let weight = store.variables()["b.weight"].shallow_clone();
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(3));
    let dense = |x: Tensor| {
        let rows = Tensor::embedding(&weight, &x, -1, false, false);
        Loss::mean(linear.forward(&rows).square().mean(Kind::Float))
    };
    refused(&micro.backward(&words(), dense).expect_err("sparse"));
    assert_eq!(linear.ws.grad(), before);
    assert!(weight.grad().is_sparse());
}

#[test]
fn replicas_refuse_them_by_name() {
    let devices = [DeviceSpec::from(test_device()).threads(1), DeviceSpec::cpu().threads(1)];
    let mut replicas = Replicas::new(devices, MicroBatches::Samples(2), net).expect("replicas");
    let before = with_gradients(replicas.store());
    let error = replicas.backward(&words(), |net, x| loss(net, &x)).expect_err("sparse");
    refused(&error);
    assert_eq!(gradients(replicas.store()), before);
}

#[test]
fn a_pipeline_refuses_them_by_name() {
    let linear = |p: &nn::Path| nn::linear(p, WIDTH, WIDTH, Default::default());
    let layers = Layers::new().add("b", table).add("c", linear).add("d", linear);
    let device = || DeviceSpec::from(test_device()).threads(1);
    let mut pipe = Pipeline::builder(layers)
        .devices([device(), device()])
        .micro_batches(MicroBatches::Count(3))
        .build()
        .expect("one");
    let mean = |out: Tensor, _: &Tensor| Loss::mean(out.square().mean(Kind::Float));
    pipe.freeze(|name| name == "b.weight").expect("frozen");
    pipe.backward(&words(), &words(), mean).expect("without the table's gradient");
    pipe.unfreeze(|_| true).expect("trained again");
    let before = copies(&pipe.gradients().expect("gradients"));
    refused(&pipe.backward(&words(), &words(), mean).expect_err("sparse"));
    assert_eq!(pipe.gradients().expect("gradients"), before);
}
