//! BatchNorm fused with the layers that follow it gives the results of the separate layers: gradients and running
//! statistics, under every policy and for every micro-batch size.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the custom kernels, `BRIMFUL_TEST_CUDA_GRAPHS=1` captures them.

use crate::support::{
    Named, assert_all_within, assert_within, logged, micro_batcher, numbers, numbers_there,
    test_device, variables,
};
use brimful::micro::MemoryFormat;
use brimful::nn::{
    BatchNorm, BatchNormConfig, BatchNormPolicy, batch_norm1d, batch_norm2d, kernels, second_use,
};
use brimful::{Loss, MicroBatches};
use tch::nn::{self, Module, ModuleT, VarStore};
use tch::{Kind, Tensor, no_grad};

const CHANNELS: i64 = 16;
const POLICIES: [BatchNormPolicy; 3] =
    [BatchNormPolicy::Deferred, BatchNormPolicy::PerMicroBatch, BatchNormPolicy::Frozen];

/// Residual block after a stem: every combination of BatchNorm and following layers.
struct Net {
    store: VarStore,
    convolutions: Vec<nn::Conv2D>,
    norms: Vec<BatchNorm>,
}

impl Net {
    fn new(policy: BatchNormPolicy) -> Self {
        let store = VarStore::new(test_device());
        let config = BatchNormConfig { policy, ..Default::default() };
        let root = store.root();
        let convolutions = (0..5).map(|i| {
            nn::conv2d(&root / format!("conv{i}"), CHANNELS, CHANNELS, 1, Default::default())
        });
        let convolutions = convolutions.collect();
        let norms =
            (0..5).map(|i| batch_norm2d(&root / format!("norm{i}"), CHANNELS, config)).collect();
        let net = Self { store, convolutions, norms };
        net.fill();
        net
    }

    fn fill(&self) {
        no_grad(|| {
            for (seed, (name, mut variable)) in variables(&self.store).into_iter().enumerate() {
                if !name.contains("running") {
                    variable.copy_(&(numbers(&variable.size(), seed as i64) * 0.5 + 0.3));
                }
            }
        });
    }

    fn conv(&self, i: usize, x: &Tensor) -> Tensor {
        self.convolutions[i].forward(x)
    }

    fn in_one(&self, x: &Tensor, train: bool) -> Tensor {
        let norms = &self.norms;
        let x = norms[0].forward_relu_pool(&self.conv(0, x), train);
        let beside = second_use(&x);
        let inner = norms[1].forward_relu(&self.conv(1, &x), train);
        let (inner, beside) = (self.conv(2, &inner), self.conv(3, &beside));
        let x = norms[2].forward_join_relu(&inner, &norms[3], &beside, train);
        let beside = second_use(&x);
        norms[4].forward_add_relu(&self.conv(4, &x), &beside, train)
    }

    fn one_by_one(&self, x: &Tensor, train: bool) -> Tensor {
        let normed = |i: usize, x: &Tensor| self.norms[i].forward_t(&self.conv(i, x), train);
        let x = normed(0, x).relu().max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false);
        let inner = normed(1, &x).relu();
        let x = (normed(2, &inner) + normed(3, &x)).relu();
        (normed(4, &x) + &x).relu()
    }
}

/// Returns gradients and running statistics after three steps.
fn trained(net: &Net, size: usize, f: impl Fn(&Net, &Tensor, bool) -> Tensor) -> Named {
    let x = numbers_there(&[13, CHANNELS, 7, 9], 5).to_kind(Kind::Float);
    let mut micro = micro_batcher(&net.store, MicroBatches::Samples(size))
        .memory_format(MemoryFormat::ChannelsLast);
    let mut last = Vec::new();
    for _ in 0..3 {
        let step = micro.backward(&x, |x| {
            let y = f(net, &x, true);
            Loss::mean((&y * &y).mean(Kind::Float))
        });
        drop(step.expect("a step"));
        let all = variables(&net.store).into_iter().filter_map(|(name, variable)| {
            let value = if name.contains("running") { variable } else { variable.grad() };
            value.defined().then(|| (name, value.copy()))
        });
        last = all.collect();
    }
    last
}

#[test]
fn in_one_or_one_by_one_training_is_the_same() {
    for policy in POLICIES {
        for size in [13, 5] {
            let together = trained(&Net::new(policy), size, Net::in_one);
            kernels::set_enabled(false);
            let apart = trained(&Net::new(policy), size, Net::one_by_one);
            kernels::set_enabled(true);
            assert!(!together.is_empty());
            assert_within(&together, &apart, 1e-3, &format!("{policy:?} by {size}"));
        }
    }
}

#[test]
fn in_one_or_one_by_one_evaluation_is_the_same() {
    let net = Net::new(BatchNormPolicy::Deferred);
    let x = numbers_there(&[3, CHANNELS, 7, 9], 5).to_kind(Kind::Float);
    let (together, apart) = no_grad(|| (net.in_one(&x, false), net.one_by_one(&x, false)));
    assert_all_within(&together, &apart, 1e-4, "evaluation");
}

#[test]
fn a_module_with_its_relu_is_the_two_modules() {
    let store = VarStore::new(test_device());
    let plain = batch_norm2d(store.root() / "a", CHANNELS, Default::default());
    let with_relu = batch_norm2d(store.root() / "b", CHANNELS, Default::default()).with_relu();
    let x = numbers_there(&[3, CHANNELS, 7, 9], 5).to_kind(Kind::Float);
    let (together, apart) = (with_relu.forward_t(&x, true), plain.forward_t(&x, true).relu());
    assert_all_within(&together, &apart, 1e-5, "training");
}

/// Returns the gradient of an input whose BatchNorm output has two uses, one of them changed in place.
fn gradient_of_changed(change_first: bool) -> Tensor {
    let store = VarStore::new(test_device());
    let norm = batch_norm1d(store.root(), CHANNELS, Default::default());
    let x = numbers_there(&[9, CHANNELS], 5).to_kind(Kind::Float).set_requires_grad(true);
    let mut first = norm.forward_t(&x, true);
    let mut second = second_use(&first);
    let _ = if change_first { &mut first } else { &mut second }.g_mul_scalar_(2.0);
    let by = numbers_there(&[9, CHANNELS], 6).to_kind(Kind::Float);
    (first * &by + second * by.square()).sum(Kind::Float).backward();
    x.grad()
}

#[test]
fn a_second_use_may_be_changed_in_place() {
    for change_first in [true, false] {
        let ours = gradient_of_changed(change_first);
        kernels::set_enabled(false);
        let theirs = gradient_of_changed(change_first);
        kernels::set_enabled(true);
        assert_all_within(&ours, &theirs, 1e-4, &format!("the first one: {change_first}"));
    }
}

#[test]
fn nothing_is_said_where_nothing_was_refused() {
    let log = logged(|| drop(trained(&Net::new(BatchNormPolicy::Deferred), 5, Net::in_one)));
    assert!(!log.contains("in the place of our own"), "{log}");
}
