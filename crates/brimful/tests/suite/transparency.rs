//! Micro-batches give exactly the gradient, loss and outputs of the full batch.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU, `BRIMFUL_TEST_CUDA_GRAPHS=1` with CUDA graphs.

use crate::support::full_batch::{Case, Classifier, batch_of, losses, there};
use crate::support::{
    Named, assert_close, assert_same, assert_within, clear, copies, fill, gradients, micro_batcher,
    numbers, numbers_there, test_device,
};
use brimful::{Loss, MicroBatches, Shared};
use brimful_torch::autograd::set_gradient;
use tch::nn::{self, Module};
use tch::{Device, Kind, Reduction, Tensor};

const SIZES: [usize; 6] = [1, 2, 7, 16, 65, 1000];
const SAMPLES: [i64; 4] = [1, 5, 64, 65];

/// Network with an unused parameter and one that already has a gradient, and its store.
fn net(kind: Kind) -> (nn::VarStore, Classifier) {
    let mut store = nn::VarStore::new(test_device());
    let net = Classifier::new(&store.root());
    store.set_kind(kind);
    fill(&store);
    let mut touched = store.variables()["one.weight"].shallow_clone();
    let earlier = Tensor::full_like(&touched, 0.25);
    set_gradient(&mut touched, Some(&earlier)).expect("a gradient");
    (store, net)
}

/// Returns the mean cross-entropy with class weights, and the sum of the samples' weights.
fn weighted(logits: &Tensor, y: &Tensor) -> (Tensor, Tensor) {
    let weights = Tensor::from_slice(&[0.5, 1.0, 2.0, 4.0]);
    let weights = weights.to_kind(logits.kind()).to_device(logits.device());
    let loss = logits.cross_entropy_loss(y, Some(&weights), Reduction::Mean, -100, 0.0);
    (loss, weights.index_select(0, y).sum(None))
}

const CLASS_WEIGHTED: Case = Case {
    name: "class-weighted",
    full: |net, (x, y, _)| weighted(&net.logits(x), y).0,
    micro: |net, (x, y, _)| {
        let (loss, weight) = weighted(&net.logits(x), y);
        Loss::mean_over(loss, &weight)
    },
};

/// Returns the results of a step: its loss, and the existing gradients by name.
fn left(store: &nn::VarStore, loss: f64) -> Named {
    let gradients = copies(&gradients(store));
    [("the loss".into(), Tensor::from(loss))].into_iter().chain(gradients).collect()
}

fn full(case: &Case, samples: i64, kind: Kind) -> Named {
    let (store, net) = net(kind);
    let loss = (case.full)(&net, &there(&batch_of(samples, kind)));
    loss.backward();
    left(&store, loss.double_value(&[]))
}

/// In-batch negatives: every sample's loss depends on all others, and a temperature is learnt.
fn contrastive(outputs: &Tensor, temperature: &Tensor) -> Tensor {
    let unit = outputs / outputs.square().sum_dim_intlist(1_i64, true, outputs.kind()).sqrt();
    let likeness = unit.matmul(&unit.tr()) * temperature;
    let same = Tensor::arange(outputs.size()[0], (Kind::Int64, outputs.device()));
    losses(&likeness, &same).mean(None)
}

#[test]
fn a_contrastive_loss_is_that_of_the_whole_mini_batch() {
    for samples in SAMPLES {
        let (x, ..) = batch_of(samples, Kind::Double);
        let ((reference, plain), x_there) = (net(Kind::Double), x.to_device(test_device()));
        let heat = |store: &nn::VarStore| store.variables()["unused"].get(0);
        let loss = contrastive(&plain.logits(&x_there), &heat(&reference));
        loss.backward();
        let expected = left(&reference, loss.double_value(&[]));
        for size in SIZES {
            let (store, net) = net(Kind::Double);
            let mut micro = micro_batcher(&store, MicroBatches::Samples(size));
            let step = micro
                .backward_whole(&x, |x| net.logits(&x), |z| contrastive(z, &heat(&store)))
                .expect("a step");
            assert_close(&left(&store, step.loss), &expected, &format!("{samples} by {size}"));
            let outputs = plain.logits(&x_there);
            assert!((step.outputs - outputs).abs().max().double_value(&[]) < 1e-12);
        }
    }
}

/// A factor belongs to the micro-batch that it was returned in, in the loss as in the gradient.
#[test]
fn a_factor_may_change_from_micro_batch_to_micro_batch() {
    let run = |size: MicroBatches| {
        let (store, net) = net(Kind::Double);
        let (x, y, _) = batch_of(12, Kind::Double);
        let factors = Tensor::arange(12, (Kind::Double, test_device())).floor_divide_scalar(4);
        let mut micro = micro_batcher(&store, size);
        let step = micro.backward(&(x, y, factors), |(x, y, factors)| {
            let losses = losses(&net.logits(&x), &y);
            match factors.size()[0] {
                4 => Loss::mean(losses.mean(Kind::Double)) * factors.double_value(&[0]),
                _ => Loss::mean((losses * factors).mean(Kind::Double)),
            }
        });
        left(&store, step.expect("a step").loss)
    };
    assert_within(
        &run(MicroBatches::Samples(4)),
        &run(MicroBatches::Samples(12)),
        1e-12,
        "factors",
    );
}

#[test]
fn outputs_come_back_in_sample_order_without_their_graphs() {
    let (store, net) = net(Kind::Double);
    let (x, y, _) = batch_of(65, Kind::Double);
    let expected = tch::no_grad(|| net.logits(&x.to_device(test_device())));
    let mut micro = micro_batcher(&store, MicroBatches::Samples(16));
    let mut calls = 0;
    let step = micro
        .backward(&(x, y.shallow_clone()), |(x, y)| {
            calls += 1;
            let logits = net.logits(&x);
            let loss = Loss::mean(losses(&logits, &y).mean(None));
            (loss, (logits, y))
        })
        .expect("a step");
    assert!(calls == 5 || step.replayed > 0, "{calls} calls");
    assert!(!step.outputs.0.requires_grad());
    assert!((step.outputs.0 - expected).abs().max().double_value(&[]) < 1e-12);
    assert_eq!(step.outputs.1.to_device(Device::Cpu), y);
}

#[test]
fn shared_values_reach_every_micro_batch_on_the_device() {
    let (store, net) = net(Kind::Double);
    let (x, y, _) = batch_of(65, Kind::Double);
    let weights = Tensor::from_slice(&[0.5, 1.0, 2.0, 4.0]);
    let mut micro = micro_batcher(&store, MicroBatches::Samples(16));
    let step = micro.backward(&(x, y, Shared(weights)), |(x, y, weights)| {
        assert_eq!(weights.device(), x.device());
        let logits = net.logits(&x);
        let loss = logits.cross_entropy_loss(&y, Some(&*weights), Reduction::Mean, -100, 0.0);
        Loss::mean_over(loss, weights.index_select(0, &y).sum(Kind::Double))
    });
    let expected = full(&CLASS_WEIGHTED, 65, Kind::Double);
    assert!((step.expect("a step").loss - expected[0].1.double_value(&[])).abs() < 1e-10);
}

/// 65,536 overflows f16, but no gradient is that large.
#[test]
fn a_weight_beyond_f16_leaves_a_gradient_in_f16() {
    let mut store = nn::VarStore::new(test_device());
    let weight = store.root().ones("weight", &[]);
    store.set_kind(Kind::Half);
    let x = Tensor::full([256], 0.5, (Kind::Half, Device::Cpu));
    let tokens = Tensor::full([256], 2048, (Kind::Int64, Device::Cpu));
    let mut micro = micro_batcher(&store, MicroBatches::Samples(32));
    let step = micro.backward(&(x, tokens), |(x, tokens)| {
        Loss::mean_over((x * &weight).mean(Kind::Half), tokens.sum(Kind::Int64))
    });
    assert_eq!(step.expect("a step").loss, 0.5);
    assert_eq!(weight.grad().double_value(&[]), 0.5);
}

/// A sum of 256 in bf16 loses small addends; one in f32 does not.
#[test]
fn half_precision_is_summed_in_f32() {
    let samples = 256;
    let x = (numbers(&[samples, 32], 3) * 0.5 + 1.0).to_kind(Kind::BFloat16);
    let run = |micro_batches: bool| {
        let mut store = nn::VarStore::new(test_device());
        let [ws_init, bs_init] = [0.01, 0.0].map(nn::Init::Const);
        let config = nn::LinearConfig { ws_init, bs_init: Some(bs_init), bias: true };
        let layer = nn::linear(store.root(), 32, 8, config);
        store.set_kind(Kind::BFloat16);
        let loss = |x: &Tensor| layer.forward(x).square().mean(Kind::Float);
        if micro_batches {
            micro_batcher(&store, MicroBatches::Samples(1))
                .backward(&x, |x| Loss::mean(loss(&x)))
                .expect("a step");
        } else {
            for i in 0..samples {
                (loss(&x.narrow(0, i, 1).to_device(test_device())) / samples as f64).backward();
            }
        }
        store.variables()["weight"].grad().to_kind(Kind::Double).to_device(Device::Cpu)
    };
    let exact = {
        let x = x.to_kind(Kind::Double);
        let weight =
            Tensor::full([8, 32], 0.01, (Kind::BFloat16, Device::Cpu)).to_kind(Kind::Double);
        let weight = weight.set_requires_grad(true);
        x.matmul(&weight.tr()).square().mean(Kind::Double).backward();
        weight.grad()
    };
    let error =
        |got: &Tensor| (got - &exact).norm().double_value(&[]) / exact.norm().double_value(&[]);
    let (ours, plain) = (error(&run(true)), error(&run(false)));
    assert!(ours * 10.0 <= plain, "{ours:e} against {plain:e}");
}

#[test]
fn a_term_of_frozen_parameters_counts_and_has_no_gradient() {
    let mut store = nn::VarStore::new(test_device());
    let root = store.root();
    let layer = nn::linear(&root / "layer", 6, 3, Default::default());
    let frozen = root.ones("frozen", &[3]).set_requires_grad(false);
    store.set_kind(Kind::Double);
    let x = numbers_there(&[5, 6], 3);
    let penalty = || frozen.square().sum(Kind::Double);
    let fit = |x: &Tensor| layer.forward(x).square().mean(Kind::Double);
    let full = fit(&x) + penalty() * 0.5 + penalty() / 15.0;
    full.backward();
    let expected = copies(&gradients(&store));
    for size in [1, 2, 5] {
        clear(&store);
        let step = micro_batcher(&store, MicroBatches::Samples(size)).backward(&x, |x| {
            let part = penalty() * (x.size()[0] as f64 / 5.0);
            Loss::once(penalty()) * 0.5 + Loss::mean(fit(&x)) + Loss::ratio(part, x.size()[0] * 3)
        });
        let step = step.expect("a step");
        assert!((step.loss - full.double_value(&[])).abs() < 1e-10, "{}", step.loss);
        assert_close(&gradients(&store), &expected, &format!("size {size}"));
    }
}

#[test]
fn gradients_from_before_the_model_had_another_kind_are_added_to() {
    let mut store = nn::VarStore::new(test_device());
    let layer = nn::linear(store.root(), 6, 3, Default::default());
    let x = numbers_there(&[5, 6], 3);
    let loss = |x: &Tensor| layer.forward(x).square().mean(Kind::Double);
    loss(&x.to_kind(Kind::Float)).backward();
    let in_f64 = |named: Named| -> Named {
        named.into_iter().map(|(n, g)| (n, g.to_kind(Kind::Double).copy())).collect()
    };
    let before = in_f64(gradients(&store));
    store.set_kind(Kind::Double);
    let mut micro = micro_batcher(&store, MicroBatches::Samples(2));
    let mut calls = 0;
    let failed = micro.backward(&x, |x| {
        calls += 1;
        if calls == 2 { Err("no more") } else { Ok(Loss::mean(loss(&x))) }
    });
    assert_eq!(failed.expect_err("the closure's error").to_string(), "no more");
    assert_same("a failed step", &before, &in_f64(gradients(&store)));
    micro.backward(&x, |x| Loss::mean(loss(&x))).expect("a step");
    let found = in_f64(gradients(&store));
    clear(&store);
    loss(&x).backward();
    let sums = gradients(&store).into_iter().zip(before);
    let sums: Named = sums.map(|((name, new), (_, old))| (name, new + old)).collect();
    assert_close(&found, &sums, "both");
}

/// Two tables added by broadcast: the backward of one sample gives both one gradient, in two views.
struct Tables {
    store: nn::VarStore,
    tables: [Tensor; 2],
}

impl Tables {
    fn new(kind: Kind) -> Self {
        let mut store = nn::VarStore::new(test_device());
        let tables = ["position", "segment"].map(|name| store.root().zeros(name, &[3, 2]));
        store.set_kind(kind);
        fill(&store);
        Self { store, tables }
    }

    fn out(&self, x: &Tensor) -> Tensor {
        self.tables.iter().fold(x.shallow_clone(), |x, table| x + table.unsqueeze(0)).tanh()
    }

    /// Squares over the count of samples, which is known only at the end.
    fn loss(&self, x: &Tensor) -> Loss {
        Loss::ratio(self.out(x).square().sum(x.kind()), x.size()[0] as f64)
    }
}

#[test]
fn what_a_plain_backward_left_in_two_views_is_added_to_once_each() {
    let x = numbers_there(&[1, 3, 2], 3);
    let both = Tables::new(Kind::Double);
    both.out(&x).square().sum(Kind::Double).backward();
    let first = copies(&gradients(&both.store));
    let mut micro = micro_batcher(&both.store, MicroBatches::Samples(1));
    micro.backward(&x, |x| both.loss(&x)).expect("a step");
    let expected: Named = first.into_iter().map(|(name, gradient)| (name, gradient * 2)).collect();
    assert_close(&gradients(&both.store), &expected, "a plain backward before");
}
