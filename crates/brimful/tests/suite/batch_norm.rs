//! Running statistics of a deferred BatchNorm are those of the whole mini-batch; an exact one matches in
//! everything.

mod exact;
mod exact_cases;
mod exact_waiting;

use crate::support::{Named, assert_within, copies, logged, numbers, variables};
use brimful::nn::{BatchNorm, BatchNormConfig, BatchNormPolicy, batch_norm1d, batch_norm2d};
use brimful::{Loss, MicroBatcher, MicroBatches};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

/// Batch whose mean is large beside its spread, so that a sum of squares would cancel.
fn batch(shape: &[i64]) -> Tensor {
    numbers(shape, 0) + 1e4
}

struct Layer {
    store: nn::VarStore,
    layer: BatchNorm,
}

fn layer(policy: BatchNormPolicy, dimensions: usize) -> Layer {
    let mut store = nn::VarStore::new(Device::Cpu);
    let config = BatchNormConfig { policy, ..Default::default() };
    let make = if dimensions == 2 { batch_norm1d } else { batch_norm2d };
    let layer = make(store.root(), 3, config);
    store.set_kind(Kind::Double);
    Layer { store, layer }
}

/// Returns the mean and the variance, in this order.
fn statistics(layer: &Layer) -> Named {
    let mut all = copies(&variables(&layer.store));
    all.retain(|(name, _)| name.starts_with("running"));
    all
}

fn train(layer: &Layer, micro: &mut MicroBatcher, x: &Tensor) {
    let step =
        micro.backward(x, |x| Loss::mean(layer.layer.forward_t(&x, true).mean(Kind::Double)));
    step.expect("a step");
}

fn assert_near(what: &str, expected: &Named, got: &Named) {
    assert_within(got, expected, 1e-12, what);
}

#[test]
fn deferred_statistics_are_the_full_batch_s_for_any_cut() {
    for shape in [vec![13, 3], vec![13, 3, 2, 5], vec![40, 3]] {
        let x = batch(&shape);
        let expected = {
            let plain = layer(BatchNormPolicy::Deferred, shape.len());
            // Outside a step the layer is an ordinary BatchNorm.
            for x in [&x, &(&x * 2.0)] {
                let _ = plain.layer.forward_t(x, true);
            }
            statistics(&plain)
        };
        // Size 12 cuts 13 samples into 7 and 6. With size 1 every micro-batch is one sample, and 40 are pooled in
        // three rounds.
        for size in [1, 2, 5, 12, 13, 100] {
            let split = layer(BatchNormPolicy::Deferred, shape.len());
            let mut micro = MicroBatcher::new(&split.store, MicroBatches::Samples(size));
            train(&split, &mut micro, &x);
            train(&split, &mut micro, &(&x * 2.0));
            assert_near(&format!("{shape:?} by {size}"), &expected, &statistics(&split));
        }
    }
}

#[test]
fn a_layer_of_one_value_leaves_the_layers_before_it_their_backward() {
    let x = batch(&[5, 3, 2, 2]);
    let two = || [layer(BatchNormPolicy::Deferred, 4), layer(BatchNormPolicy::Deferred, 2)];
    let run = |[first, second]: &[Layer; 2], x: &Tensor| {
        // Without the square, the pooled value would be the same for every sample.
        let pooled =
            first.layer.forward_t(x, true).square().mean_dim([2, 3].as_slice(), false, None);
        second.layer.forward_t(&pooled, true).mean(Kind::Double)
    };
    let split = two();
    let mut micro = MicroBatcher::new(&split[0].store, MicroBatches::Samples(1));
    micro.backward(&x, |x| Loss::mean(run(&split, &x))).expect("a step");
    let plain = layer(BatchNormPolicy::Deferred, 4);
    let _ = plain.layer.forward_t(&x, true);
    assert_near("the first", &statistics(&plain), &statistics(&split[0]));
}

#[test]
fn the_other_policies_do_what_they_say() {
    let x = batch(&[12, 3]);
    let frozen = layer(BatchNormPolicy::Frozen, 2);
    let before = statistics(&frozen);
    let mut micro = MicroBatcher::new(&frozen.store, MicroBatches::Samples(4));
    train(&frozen, &mut micro, &x);
    assert_eq!(before, statistics(&frozen));

    let at_once = layer(BatchNormPolicy::PerMicroBatch, 2);
    let mut micro = MicroBatcher::new(&at_once.store, MicroBatches::Samples(4));
    train(&at_once, &mut micro, &x);
    let plain = layer(BatchNormPolicy::PerMicroBatch, 2);
    for x in x.split(4, 0) {
        let _ = plain.layer.forward_t(&x, true);
    }
    assert_eq!(statistics(&plain), statistics(&at_once));
}

#[test]
fn the_layer_of_tch_is_warned_of_once_and_only_where_it_matters() {
    let x = batch(&[12, 3]);
    let reported = |size: usize| {
        let mut store = nn::VarStore::new(Device::Cpu);
        let layer = nn::batch_norm1d(store.root(), 3, Default::default());
        store.set_kind(Kind::Double);
        let mut reported = Vec::new();
        let log = logged(|| {
            let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(size));
            for _ in 0..3 {
                let loss = |x: Tensor| Loss::mean(layer.forward_t(&x, true).mean(Kind::Double));
                reported.push(micro.backward(&x, loss).expect("a step").unmanaged_norms);
            }
        });
        (log.matches("WARN").count(), reported)
    };
    // Once in the log, and in every step's report.
    assert_eq!(reported(4), (1, vec![1; 3]));
    assert_eq!(reported(12), (0, vec![0; 3]));
}

/// An evaluation of such a layer says nothing about training.
#[test]
fn the_layer_of_tch_is_put_back_even_if_the_first_call_was_an_evaluation() {
    let x = batch(&[12, 3]);
    let mut store = nn::VarStore::new(Device::Cpu);
    let layer = nn::batch_norm1d(store.root(), 3, Default::default());
    store.set_kind(Kind::Double);
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(4));
    let loss = |x: Tensor, train| layer.forward_t(&x, train).mean(Kind::Double);
    micro.evaluate(&x, |x| Loss::mean(loss(x, false))).expect("an evaluation");
    for _ in 0..2 {
        let before = layer.running_mean.copy();
        let failed = micro.backward(&x, |x| Loss::mean(loss(x, true) / 0.0));
        assert!(failed.is_err());
        assert_eq!(layer.running_mean, before);
        micro.backward(&x, |x| Loss::mean(loss(x, true))).expect("a step");
        assert_ne!(layer.running_mean, before);
    }
}

/// A loss on all outputs runs each micro-batch twice.
#[test]
fn the_layer_of_tch_moves_once_for_each_micro_batch_of_a_loss_on_all_outputs() {
    let x = batch(&[12, 3]);
    let [mut plain, mut store] = [(); 2].map(|()| nn::VarStore::new(Device::Cpu));
    let [alike, layer] =
        [&plain, &store].map(|store| nn::batch_norm1d(store.root(), 3, Default::default()));
    plain.set_kind(Kind::Double);
    store.set_kind(Kind::Double);
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(4));
    for number in 0..2 {
        for part in x.split(4, 0) {
            let _ = alike.forward_t(&part, true);
        }
        let forward = |x: Tensor| layer.forward_t(&x, true);
        micro.backward_whole(&x, forward, |out| out.mean(Kind::Double)).expect("a step");
        assert_eq!(layer.running_mean, alike.running_mean, "step {number}");
        assert_eq!(layer.running_var, alike.running_var, "step {number}");
    }
}

#[test]
fn a_single_value_moves_the_mean_alone() {
    let only = layer(BatchNormPolicy::Deferred, 2);
    let before = statistics(&only);
    let mut micro = MicroBatcher::new(&only.store, MicroBatches::Samples(1));
    train(&only, &mut micro, &batch(&[1, 3]));
    let after = statistics(&only);
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1], before[1], "of one value there is none");
}
