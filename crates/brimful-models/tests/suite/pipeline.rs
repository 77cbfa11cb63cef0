//! U-Net, AmoebaNet-D and ResNets have the same loss and gradients in a pipeline as without: with skips across
//! stages, with pairs of tensors at every boundary, and with exact BatchNorms.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use brimful::layers::Model;
use brimful::nn::BatchNormPolicy;
use brimful::schedule::{Recompute, Schedule};
use brimful::{DeviceSpec, Layers, Loss, MicroBatcher, MicroBatches, Pipeline, StepRng};
use brimful_models::{AmoebaNet, ResNet, UNet};
use tch::nn::VarStore;
use tch::{Device, Kind, Reduction, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const SAMPLES: i64 = 5;

/// The default generator is global, so tests that draw from it run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(5);
    turn
}

fn pipeline(layers: &Layers, balance: &[usize], m: usize, recompute: Recompute) -> Pipeline {
    let devices = balance.iter().map(|_| DeviceSpec::cpu().threads(1));
    Pipeline::builder(layers.clone())
        .devices(devices)
        .balance(balance.to_vec())
        .micro_batches(MicroBatches::Count(m))
        .schedule(Schedule::OneFOneB)
        .recompute(recompute)
        .kind(Kind::Double)
        .build()
        .expect("a pipeline")
}

/// Builds the plain model with the pipeline's values.
fn plain(layers: &Layers, pipe: &Pipeline) -> (VarStore, Model) {
    let mut store = VarStore::new(Device::Cpu);
    let model = layers.build(&store.root()).expect("a model");
    store.double();
    let mut here = store.variables();
    tch::no_grad(|| {
        for (name, value) in pipe.variables().expect("variables") {
            here.get_mut(&name).expect("the same names").copy_(&value);
        }
    });
    (store, model)
}

/// Compares a step of both, with the plain model's cut into `size`, and the same random numbers.
fn compare(
    layers: &Layers,
    mut pipe: Pipeline,
    x: &Tensor,
    loss: fn(&Tensor) -> Loss,
    size: MicroBatches,
) {
    let what = format!("balance {}", pipe.balance());
    let (store, model) = plain(layers, &pipe);
    let step = pipe.backward(x, x, move |out: Tensor, _| loss(&out)).expect("a step");
    let i = Cell::new(0);
    let expected = MicroBatcher::new(&store, size).backward(x, |x| {
        let rng = StepRng::new(step.seed.expect("a seed"), i.replace(i.get() + 1));
        loss(&model.forward_with_rng(&[x], true, rng)[0])
    });
    let expected = expected.expect("a plain step").loss;
    assert!((step.loss - expected).abs() < 1e-10, "{what}: {} not {expected}", step.loss);
    let gradients = pipe.gradients().expect("gradients");
    assert_eq!(gradients.len(), store.trainable_variables().len(), "{what}");
    let variables = store.variables();
    let norm = |t: &Tensor| t.abs().max().double_value(&[]);
    let largest = gradients.iter().map(|(_, gradient)| norm(gradient)).fold(0.0, f64::max);
    for (name, gradient) in gradients {
        let error = norm(&(&gradient - variables[&name].grad())) / largest;
        assert!(error < 1e-10, "{what}: {name} is off by {error:e}");
    }
    for (name, value) in pipe.variables().expect("variables") {
        let error = norm(&(&value - &variables[&name])) / norm(&value).max(1e-3);
        assert!(error < 1e-10, "{what}: {name} has moved elsewhere, by {error:e}");
    }
}

fn mean_square(out: &Tensor) -> Loss {
    Loss::mean((out - 1.0).square().mean(Kind::Double))
}

fn cross_entropy(out: &Tensor) -> Loss {
    let classes = Tensor::ones([out.size()[0]], (Kind::Int64, Device::Cpu));
    Loss::mean(out.cross_entropy_loss::<Tensor>(&classes, None, Reduction::Mean, -100, 0.0))
}

#[test]
fn a_u_net_in_stages_is_the_plain_one_on_the_whole_mini_batch() {
    let _turn = alone();
    let layers = UNet { dropout: 0.0, ..UNet::new(2, 2) }.layers().expect("a shape");
    let x = Tensor::randn([SAMPLES, 3, 64, 64], DOUBLE);
    for balance in [&[20, 23][..], &[8, 15, 20]] {
        for recompute in Recompute::ALL {
            let pipe = pipeline(&layers, balance, 3, recompute);
            compare(&layers, pipe, &x, mean_square, MicroBatches::Count(1));
        }
    }
}

#[test]
fn a_u_net_in_stages_drops_the_plain_one_s_channels() {
    let _turn = alone();
    let layers = UNet { dropout: 0.3, ..UNet::new(2, 4) }.layers().expect("a shape");
    let x = Tensor::randn([SAMPLES, 3, 64, 64], DOUBLE);
    let pipe = pipeline(&layers, &[3, 30, 10], 2, Recompute::Always);
    compare(&layers, pipe, &x, mean_square, MicroBatches::Count(2));
}

#[test]
fn an_amoebanet_in_stages_is_the_plain_one_on_the_same_micro_batches() {
    let _turn = alone();
    let layers = AmoebaNet::new(3, 8, 4).layers().expect("a shape");
    let x = Tensor::randn([SAMPLES, 3, 64, 64], DOUBLE);
    // A stage of one cell passes on one of its inputs; the head ignores one of a pair.
    for balance in [&[9][..], &[4, 5], &[3, 1, 5], &[1, 7, 1]] {
        for recompute in Recompute::ALL {
            let pipe = pipeline(&layers, balance, 2, recompute);
            compare(&layers, pipe, &x, cross_entropy, MicroBatches::Count(2));
        }
    }
}

/// Compares a step of a pipeline with exact BatchNorms, in micro-batches of these sizes, with the plain model on the
/// whole mini-batch. The plain model has the same variables in other layers.
fn compare_exact(exact: &Layers, coarse: &Layers, x: &Tensor, sizes: &[usize]) {
    for size in sizes {
        let pipe = Pipeline::builder(exact.clone()).kind(Kind::Double);
        let pipe =
            pipe.micro_batches(MicroBatches::Samples(*size)).recompute(Recompute::ExceptLast);
        let whole = MicroBatches::Samples(x.size()[0] as usize);
        compare(coarse, pipe.build().expect("a pipeline"), x, mean_square, whole);
    }
}

#[test]
fn residual_networks_with_exact_batch_norms_are_the_plain_ones_on_the_whole_mini_batch() {
    let _turn = alone();
    let exact = |net: ResNet| net.batch_norm(BatchNormPolicy::Exact).layers();
    let digits = Tensor::randn([SAMPLES, 1, 8, 8], DOUBLE);
    let small = || ResNet::resnet18(4).small_images(1);
    compare_exact(&exact(small()), &small().layers(), &digits, &[1, 2, 5]);
    let photographs = Tensor::randn([SAMPLES, 3, 33, 33], DOUBLE);
    let large = || ResNet::resnet50(4);
    compare_exact(&exact(large()), &large().layers(), &photographs, &[2]);
}

#[test]
fn an_amoebanet_with_exact_batch_norms_is_the_plain_one_on_the_whole_mini_batch() {
    let _turn = alone();
    let net = AmoebaNet::new(3, 8, 4);
    let exact = net.clone().batch_norm(BatchNormPolicy::Exact).layers().expect("a shape");
    let x = Tensor::randn([SAMPLES, 3, 64, 64], DOUBLE);
    compare_exact(&exact, &net.layers().expect("a shape"), &x, &[1, 2]);
}
