//! A failed step leaves gradients, statistics and random state unchanged.

use crate::support::state::{Net, samples, state};
use crate::support::{assert_fails, assert_same, test_device};
use brimful::NonFinitePolicy;
use brimful::StepError;
use brimful::{Error, Loss, MicroBatcher, MicroBatches, Replicas};
use brimful_torch::autograd::set_gradient;
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

/// Network with an earlier gradient, which must neither be lost nor counted twice; its other variables have none.
fn net_with_a_gradient() -> Net {
    let net = Net::with_dropout();
    let mut weight = net.store.variables()["one.weight"].shallow_clone();
    let earlier = Tensor::full_like(&weight, 0.25);
    set_gradient(&mut weight, Some(&earlier)).expect("a gradient");
    net
}

fn batch() -> Tensor {
    samples(12)
}

/// Runs a step that must fail with these words, and checks that nothing has changed.
#[track_caller]
fn refused(words: &str, loss: impl Fn(&Net, &Tensor) -> Loss) {
    let net = net_with_a_gradient();
    let before = state(&net.store);
    let mut micro = MicroBatcher::new(&net.store, MicroBatches::Samples(5))
        .non_finite(NonFinitePolicy::RefuseGradients);
    assert_fails(micro.backward(&batch(), |x| loss(&net, &x)), &[words]);
    assert_same(words, &before, &state(&net.store));
}

#[test]
fn bad_losses_are_refused_with_their_numbers_and_nothing_changes() {
    let out = |net: &Net, x: &Tensor| net.layers.forward_t(x, true);
    let mean = |net: &Net, x: &Tensor| out(net, x).mean(Kind::Double);
    refused("has the shape [4, 3]", |net, x| Loss::mean(out(net, x)));
    refused("has no gradient", |_, x| Loss::mean(x.mean(Kind::Double)));
    refused("shape [4, 4]: sum it", |net, x| Loss::mean_over(mean(net, x), x));
    refused("sum to 0", |net, x| Loss::mean_over(mean(net, x), 0.0));
    refused("sum to 0", |net, x| {
        Loss::ratio(mean(net, x), Tensor::zeros([1], (Kind::Double, Device::Cpu)))
    });
    refused("is NaN (weight 4) in micro-batch 0", |net, x| Loss::mean(mean(net, x) * f64::NAN));
    refused("in micro-batch 2", |net, x| {
        let third = x.double_value(&[0, 0]) == batch().double_value(&[8, 0]);
        Loss::sum(mean(net, x) * if third { f64::INFINITY } else { 1.0 })
    });
    refused("a gradient is not finite, first in micro-batch 0", |net, x| {
        // The root of 0 is finite; its slope is not.
        let zero = mean(net, x) * 0.0;
        Loss::mean(zero.sqrt())
    });
    refused("backward through the graph a second time", |net, x| {
        let loss = mean(net, x);
        loss.backward();
        Loss::mean(loss)
    });
}

/// Returns a weight of this dtype; the gradient of each sample is the sample itself.
fn weight_of(kind: Kind) -> (nn::VarStore, Tensor) {
    let mut store = nn::VarStore::new(test_device());
    let weight = store.root().ones("weight", &[4]);
    store.set_kind(kind);
    (store, weight)
}

fn times(weight: &Tensor, x: &Tensor) -> Tensor {
    (x * weight).to_kind(Kind::Float)
}

/// Runs a step with one of a batcher's methods, on a weight and samples.
type Verb = fn(&mut MicroBatcher, &Tensor, &Tensor) -> brimful::Result<()>;

const VERBS: [(&str, Verb); 3] = [
    ("backward", |micro, weight, x| {
        micro.backward(x, |x| Loss::sum(times(weight, &x).sum(Kind::Float))).map(drop)
    }),
    ("accumulate and commit", |micro, weight, x| {
        for sample in x.split(1, 0) {
            micro.accumulate(&sample, |x| Loss::sum(times(weight, &x).sum(Kind::Float)))?;
        }
        micro.commit().map(drop)
    }),
    ("backward_whole", |micro, weight, x| {
        let sum = |out: &Tensor| out.sum(Kind::Float);
        micro.backward_whole(x, |x| times(weight, &x), sum).map(drop)
    }),
];

/// f16 overflows at 65,504: each sample's gradient is finite, and so is their sum in f32.
#[test]
fn a_gradient_that_is_not_finite_as_it_is_committed_is_refused_by_every_verb() {
    let x = Tensor::full([2, 1], 4e4, (Kind::Half, test_device()));
    for (name, run) in VERBS {
        let (store, weight) = weight_of(Kind::Half);
        let micro = || MicroBatcher::new(&store, MicroBatches::Samples(1));
        let mut strict = micro().non_finite(NonFinitePolicy::RefuseGradients);
        let refused =
            Error::Step(StepError::NonFiniteSum { parameter: "weight".into(), kind: Kind::Half });
        assert_eq!(run(&mut strict, &weight, &x), Err(refused.clone()), "{name}");
        assert!(!weight.grad().defined(), "{name}");
        // The sum with an earlier gradient counts.
        for expected in [Ok(()), Err(refused)] {
            assert_eq!(run(&mut strict, &weight, &x.narrow(0, 0, 1)), expected, "{name}");
            assert_eq!(weight.grad().double_value(&[0]), 4e4, "{name}");
        }
        run(&mut micro(), &weight, &x).expect("nobody looks");
        assert_eq!(weight.grad().double_value(&[0]), f64::INFINITY, "{name}");
    }
}

#[test]
fn finite_gradients_whose_squares_are_not_are_no_reason_to_refuse() {
    let x = Tensor::full([2, 1], 1e30, (Kind::Float, test_device()));
    for (name, run) in VERBS {
        let (store, weight) = weight_of(Kind::Float);
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(1));
        run(&mut micro.non_finite(NonFinitePolicy::RefuseGradients), &weight, &x).expect(name);
        assert!((weight.grad().double_value(&[0]) / 2e30 - 1.0).abs() < 1e-6, "{name}");
    }
}

#[test]
fn a_loss_over_the_whole_mini_batch_is_held_to_finite_gradients_too() {
    let net = net_with_a_gradient();
    let before = state(&net.store);
    let mut micro = MicroBatcher::new(&net.store, MicroBatches::Samples(5))
        .non_finite(NonFinitePolicy::RefuseGradients);
    let forward = |x: Tensor| net.layers.forward_t(&x, true);
    // The root of 0 is finite; its slope is not.
    let root = |out: &Tensor| (out * 0.0).sqrt().sum(Kind::Double);
    assert_fails(micro.backward_whole(&batch(), forward, root), &["is not finite in Double"]);
    assert_same("refused", &before, &state(&net.store));
}

#[test]
fn bad_batches_and_sizes_are_refused() {
    let net = Net::with_dropout();
    let zeros = |rows| Tensor::zeros([rows, 4], (Kind::Double, Device::Cpu));
    let mut micro = MicroBatcher::new(&net.store, MicroBatches::Samples(4));
    assert_fails(micro.backward(&zeros(0), |x| net.loss(&x)), &["empty"]);
    let uneven = micro.backward(&(zeros(3), zeros(2)), |(x, _)| net.loss(&x));
    assert_fails(uneven, &["3 and 2 long"]);
    assert_fails(micro.commit(), &["call `accumulate` first"]);
    micro.accumulate(&batch(), |x| net.loss(&x)).expect("a part");
    let open = micro.backward(&batch(), |x| net.loss(&x));
    assert_fails(open, &["12 samples have been accumulated"]);
    for size in [MicroBatches::Samples(0), MicroBatches::Count(0)] {
        let mut micro = MicroBatcher::new(&net.store, size);
        assert_fails(micro.backward(&batch(), |x| net.loss(&x)), &["0"]);
    }
    let mut calls = 0;
    let mut micro = MicroBatcher::new(&net.store, MicroBatches::Samples(4));
    let differ = micro.backward(&batch(), |x| {
        calls += 1;
        if calls == 1 { net.loss(&x) } else { Loss::sum(x.sum(Kind::Double)) + net.loss(&x) }
    });
    let differ = differ.expect_err("another loss").to_string();
    assert!(differ.contains("no gradient") || differ.contains("terms"), "{differ}");
}

#[test]
fn a_window_whose_parameters_are_frozen_half_way_is_refused_and_kept() {
    let build = |root: &nn::Path| [root.ones("a", &[3]), root.ones("b", &[3])];
    let loss = |[a, b]: &[Tensor; 2], x: &Tensor| {
        Loss::mean((a * x).mean(Kind::Float) + (b * x).square().mean(Kind::Float))
    };
    let x = Tensor::ones([4, 3], (Kind::Float, Device::Cpu)) * 2.0;
    let refused = |error: Error| {
        assert_eq!(error, Error::Step(StepError::TrainedChanged { samples: 4, then: 2, now: 1 }));
    };
    let gradients = |[a, b]: [Tensor; 2]| [a.grad(), b.grad()].map(|g| g.double_value(&[0]));

    let store = nn::VarStore::new(Device::Cpu);
    let pair = build(&store.root());
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
    micro.accumulate(&x, |x| loss(&pair, &x)).expect("the first");
    let _ = pair[0].set_requires_grad(false);
    refused(micro.commit().expect_err("another parameter"));
    refused(micro.accumulate(&x, |x| loss(&pair, &x)).expect_err("another parameter"));
    let _ = pair[0].set_requires_grad(true);
    micro.commit().expect("what was kept");
    let expected = gradients(pair);

    let mut replicas =
        Replicas::new([Device::Cpu, Device::Cpu], MicroBatches::Samples(2), build).expect("two");
    let twins = || ["a", "b"].map(|name| replicas_variable(&replicas, name));
    let pair = twins();
    replicas.accumulate(&x, move |pair, x: Tensor| loss(pair, &x)).expect("the first");
    let _ = pair[0].set_requires_grad(false);
    refused(replicas.commit().expect_err("another parameter"));
    let _ = pair[0].set_requires_grad(true);
    replicas.commit().expect("what was kept");
    assert_eq!(gradients(pair), expected);
}

fn replicas_variable<M: 'static>(replicas: &Replicas<M>, name: &str) -> Tensor {
    replicas.store().variables()[name].shallow_clone()
}
