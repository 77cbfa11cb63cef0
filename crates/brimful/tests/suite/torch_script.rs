//! A TorchScript module is trained as any other: in micro-batches, and as a layer of a pipeline.

use crate::support::{Named, Update, assert_within, variables};
use brimful::optim::{Optimizer, Sgd};
use brimful::{Layers, Loss, MicroBatcher, MicroBatches, Pipeline};
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor, TrainableCModule};

/// Two linear layers with a tanh between them, written by `perceptron.py` beside it.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/perceptron.pt");
/// Tolerance of f32 sums in another order.
const ROUNDING: f64 = 1e-5;

/// Builds the same model in tch.
fn plain(path: &nn::Path<'_>) -> impl ModuleT + use<> {
    let [weight1, bias1, weight2, bias2] =
        [("weight1", &[6, 4][..]), ("bias1", &[6]), ("weight2", &[3, 6]), ("bias2", &[3])]
            .map(|(name, shape)| path.zeros(name, shape));
    nn::func_t(move |x, _| {
        let hidden = x.linear(&weight1, Some(&bias1)).tanh();
        hidden.linear(&weight2, Some(&bias2))
    })
}

fn script(path: &nn::Path<'_>) -> TrainableCModule {
    TrainableCModule::load(FILE, path / "script").expect("a module")
}

fn data() -> (Tensor, Tensor) {
    let x = crate::support::numbers(&[10, 4], 1).to_kind(Kind::Float);
    (x, Tensor::arange(10, (Kind::Int64, Device::Cpu)).remainder(3))
}

fn loss(out: &Tensor, y: &Tensor) -> Loss {
    Loss::mean(out.cross_entropy_for_logits(y))
}

/// Returns the result of three steps of the tch model on the whole batch.
fn expected() -> Named {
    let mut store = VarStore::new(Device::Cpu);
    let model = plain(&(store.root() / "script"));
    let saved = VarStore::new(Device::Cpu);
    let _module = script(&saved.root());
    store.copy(&saved).expect("the same variables");
    let mut optimizer = Optimizer::new(&store, Sgd::new(0.5)).expect("an optimizer");
    let (x, y) = data();
    for _ in 0..3 {
        model.forward_t(&x, true).cross_entropy_for_logits(&y).backward();
        optimizer.update();
    }
    variables(&store)
}

#[test]
fn a_torch_script_module_is_trained_in_micro_batches_as_the_plain_model() {
    let store = VarStore::new(Device::Cpu);
    let model = script(&store.root());
    let mut optimizer = Optimizer::new(&store, Sgd::new(0.5)).expect("an optimizer");
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(3));
    for _ in 0..3 {
        let step = micro.backward(&data(), |(x, y)| loss(&model.forward_t(&x, true), &y));
        step.expect("a step");
        optimizer.update();
    }
    assert_within(&variables(&store), &expected(), ROUNDING, "micro-batches");
}

#[test]
fn a_torch_script_module_is_a_layer_of_a_pipeline() {
    let layers = Layers::new()
        .add_fn("same", |x| x.shallow_clone())
        .add("script", |path| TrainableCModule::load(FILE, path.clone()).expect("a module"));
    let mut pipe = Pipeline::builder(layers)
        .devices([Device::Cpu; 2])
        .micro_batches(MicroBatches::Count(4))
        .build()
        .expect("a pipeline");
    let mut optimizer = pipe.optimizer(Sgd::new(0.5)).expect("an optimizer");
    let (x, y) = data();
    for _ in 0..3 {
        pipe.backward(&x, &y, |out: Tensor, y| loss(&out, y)).expect("a step");
        optimizer.update();
    }
    assert_within(&pipe.variables().expect("variables"), &expected(), ROUNDING, "pipeline");
}
