//! References for tests of several devices and ranks: a small model, its samples, the full batch's loss and
//! gradients.

use brimful::{DeviceSpec, Loss, MicroBatches, Replicas};
use tch::nn::{self, ModuleT};
use tch::{Kind, Reduction, Tensor};

use super::{TOLERANCE, assert_close, gradients, numbers, test_device};

pub const CLASSES: i64 = 4;

pub type Batch = (Tensor, Tensor, Tensor);

/// Returns inputs, classes, and a weight for each sample, in f64 on the tested device.
pub fn batch(samples: i64) -> Batch {
    there(&batch_of(samples, Kind::Double))
}

/// Returns a batch of this dtype, in host memory.
pub fn batch_of(samples: i64, kind: Kind) -> Batch {
    batch_from(samples, kind, 0)
}

/// Returns a different batch for each seed.
pub fn batch_from(samples: i64, kind: Kind, seed: i64) -> Batch {
    let x = numbers(&[samples, 6], 100 + seed).to_kind(kind);
    let y = (numbers(&[samples], 200 + seed) * 1e4).remainder(CLASSES as f64);
    let tokens = (numbers(&[samples], 300 + seed) * 1e4).remainder(8.0).floor() + 1.0;
    (x, y.to_kind(Kind::Int64), tokens.to_kind(kind))
}

/// Copies a batch to the tested device.
pub fn there((x, y, tokens): &Batch) -> Batch {
    let there = |t: &Tensor| t.to_device(test_device());
    (there(x), there(y), there(tokens))
}

/// Network, and one of its parameters for a penalty.
#[derive(Debug)]
pub struct Classifier {
    pub layers: nn::SequentialT,
    pub scale: Tensor,
}

impl Classifier {
    /// Makes a network of two linear layers only.
    pub fn new(root: &nn::Path) -> Self {
        Self::after(nn::seq_t(), root)
    }

    /// Makes a network of these layers and two linear ones, and a parameter that is never used.
    pub fn after(first: nn::SequentialT, root: &nn::Path) -> Self {
        let layers = first
            .add(nn::linear(root / "one", 6, 8, Default::default()))
            .add_fn(|x| x.tanh())
            .add(nn::linear(root / "two", 8, CLASSES, Default::default()));
        let _unused = root.randn_standard("unused", &[3]);
        Self { layers, scale: root.ones("scale", &[CLASSES]) }
    }

    /// Returns the logits without anything that depends on the micro-batch size.
    pub fn logits(&self, x: &Tensor) -> Tensor {
        self.layers.forward_t(x, false) * &self.scale
    }
}

/// Makes the plain model, in f64 on the tested device.
pub fn plain(net: impl FnOnce(&nn::Path) -> Classifier) -> (nn::VarStore, Classifier) {
    tch::manual_seed(1);
    let mut store = nn::VarStore::new(test_device());
    let net = net(&store.root());
    store.double();
    (store, net)
}

/// Returns the tested device, and CPUs beside it: an accelerator may be named only once.
pub fn devices(replicas: usize) -> Vec<DeviceSpec> {
    let mut devices = vec![DeviceSpec::cpu().threads(1); replicas];
    devices[0] = DeviceSpec::from(test_device()).threads(1);
    devices
}

/// Makes replicas of the plain model with two linear layers only.
pub fn replicated(replicas: usize, size: MicroBatches) -> Replicas<Classifier> {
    tch::manual_seed(1);
    let mut replicas = Replicas::new(devices(replicas), size, Classifier::new).expect("replicas");
    replicas.store_mut().double();
    replicas
}

pub fn losses(logits: &Tensor, y: &Tensor) -> Tensor {
    logits.cross_entropy_loss::<Tensor>(y, None, Reduction::None, -100, 0.0)
}

pub fn over_tokens(net: &Classifier, (x, y, tokens): &Batch) -> (Tensor, Tensor) {
    ((losses(&net.logits(x), y) * tokens).sum(None), tokens.sum(None))
}

pub fn penalty(net: &Classifier) -> Tensor {
    net.scale.square().sum(None) * 0.01
}

/// Loss of the full batch, and as a sum over micro-batches.
pub struct Case {
    pub name: &'static str,
    pub full: fn(&Classifier, &Batch) -> Tensor,
    pub micro: fn(&Classifier, &Batch) -> Loss,
}

pub const MEAN: Case = Case {
    name: "mean",
    full: |net, (x, y, _)| losses(&net.logits(x), y).mean(None),
    micro: |net, (x, y, _)| Loss::mean(losses(&net.logits(x), y).mean(None)),
};

pub const OVER_TOKENS: Case = Case {
    name: "over tokens",
    full: full_over_tokens,
    micro: |net, batch| {
        let (sum, count) = over_tokens(net, batch);
        Loss::mean_over(sum / &count, count)
    },
};

pub const SEVERAL_WITH_A_SUM: Case = Case {
    name: "several terms, one a sum",
    full: |net, batch| {
        let squares = net.logits(&batch.0).square();
        full_over_tokens(net, batch) * 0.5 + squares.sum(None) + penalty(net)
    },
    micro: |net, batch| {
        let (sum, count) = over_tokens(net, batch);
        let squares = net.logits(&batch.0).square();
        Loss::mean_over(sum / &count, count) * 0.5
            + Loss::sum(squares.sum(None))
            + Loss::once(penalty(net))
    },
};

fn full_over_tokens(net: &Classifier, batch: &Batch) -> Tensor {
    let (sum, count) = over_tokens(net, batch);
    sum / count
}

pub fn distance(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

#[track_caller]
pub fn assert_loss(found: f64, expected: &Tensor, what: &str) {
    let off = (found - expected.double_value(&[])).abs();
    assert!(off < TOLERANCE, "{what}: the loss is {off} off");
}

#[track_caller]
pub fn assert_gradients(what: &str, plain: &nn::VarStore, store: &nn::VarStore) {
    assert_close(&gradients(store), &gradients(plain), what);
}
