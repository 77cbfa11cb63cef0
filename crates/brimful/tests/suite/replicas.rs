//! Replicas give exactly the gradient, loss, statistics and outputs of the plain model.

use crate::support::full_batch::{
    Classifier, MEAN, assert_gradients, batch, devices, distance, losses, plain, replicated,
};
use crate::support::{TOLERANCE, assert_fails, clear, numbers_there, test_device};
use brimful::batch::BatchError;
use brimful::nn::batch_norm1d;
use brimful::replicas::ReplicasError;
use brimful::{DeviceSpec, Error, Loss, MicroBatches, Replicas};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

/// Only samples of the second replica's part reach the scale: if the replicas' devices differ, its gradient is
/// first on another device than the parameter.
#[test]
fn a_parameter_that_a_later_replica_alone_reaches_gets_its_gradient() {
    let ((store, model), mut replicas) =
        (plain(Classifier::new), replicated(3, MicroBatches::Samples(2)));
    let (x, y, _) = batch(12);
    let flags = Tensor::arange(12, (Kind::Double, Device::Cpu)).ge(6.0);
    let loss = |net: &Classifier, (x, y, flags): (Tensor, Tensor, Tensor)| {
        let logits = net.layers.forward_t(&x, false);
        let reaches = flags.any().int64_value(&[]) != 0;
        let logits = if reaches { logits * &net.scale } else { logits };
        Loss::mean(losses(&logits, &y).mean(Kind::Double))
    };
    let plainly = |from: i64| {
        let part = |whole: &Tensor| whole.narrow(0, from, 6);
        let logits = model.layers.forward_t(&part(&x), false);
        let logits = if from > 0 { logits * &model.scale } else { logits };
        losses(&logits, &part(&y)).sum(Kind::Double) / 12.0
    };
    for _ in 0..2 {
        (plainly(0) + plainly(6)).backward();
        let batch = (x.shallow_clone(), y.shallow_clone(), flags.shallow_clone());
        replicas.backward(&batch, loss).expect("a step");
        assert_gradients("the scale's too", &store, replicas.store());
        assert_eq!(replicas.store().variables()["scale"].grad().device(), test_device());
    }
}

#[test]
fn gradients_and_deferred_statistics_are_those_of_all_samples_however_uneven_the_speeds() {
    let layers = |root: &nn::Path| {
        nn::seq_t().add(batch_norm1d(root / "norm", 6, Default::default())).add(nn::linear(
            root / "one",
            6,
            2,
            Default::default(),
        ))
    };
    let mut store = nn::VarStore::new(test_device());
    let model = layers(&store.root());
    store.double();
    for (count, speeds) in [(2, vec![1.0, 1.0]), (3, vec![1.0, 5.0, 2.0])] {
        let mut replicas =
            Replicas::new(devices(count), MicroBatches::Samples(3), layers).expect("replicas");
        replicas.set_speeds(&speeds).expect("speeds");
        replicas.store_mut().double();
        replicas.store_mut().copy(&store).expect("the same model");
        for samples in [40, 23] {
            let x = numbers_there(&[samples, 6], samples);
            clear(&store);
            clear(replicas.store());
            model.forward_t(&x, false).square().mean(Kind::Double).backward();
            let _whole = model.forward_t(&x, true);
            // By the running statistics, the gradients do not depend on the cut.
            let step = replicas.backward(&x, |net, x| {
                let _whole = tch::no_grad(|| net.forward_t(&x, true));
                Loss::mean(net.forward_t(&x, false).square().mean(Kind::Double))
            });
            step.expect("a step");
            assert_gradients(&format!("{count} replicas"), &store, replicas.store());
            let others = replicas.store().variables();
            for (name, expected) in store.variables().iter().filter(|(n, _)| n.contains("running"))
            {
                let off = distance(expected, &others[name]);
                assert!(off < TOLERANCE, "{name} is {off} off with {count} replicas");
            }
        }
    }
}

#[test]
fn bad_replicas_are_refused_with_what_would_help() {
    let none: [Device; 0] = [];
    let error =
        Replicas::new(none, MicroBatches::Samples(1), Classifier::new).expect_err("no device");
    assert_eq!(error, Error::Replicas(ReplicasError::NoDevices));
    let calls = std::sync::atomic::AtomicI64::new(3);
    let unlike = move |root: &nn::Path| {
        let rows = calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        nn::linear(root / "one", rows, 2, Default::default())
    };
    let cpus = || vec![DeviceSpec::cpu().threads(1); 2];
    let two_models = Replicas::new(cpus(), MicroBatches::Samples(1), unlike);
    assert_fails(two_models, &["replica 1", "'one.weight'", "[2, 3]", "[2, 4]"]);
    assert_fails(Replicas::new(cpus(), MicroBatches::Samples(0), Classifier::new), &["0 samples"]);
    assert_fails(
        replicated(2, MicroBatches::Samples(2)).set_speeds(&[1.0]),
        &["1 speeds", "2 replicas"],
    );
    assert_fails(
        replicated(2, MicroBatches::Samples(2)).set_speeds(&[1.0, 0.0]),
        &["replica 1 cannot be 0"],
    );
    let mut replicas = replicated(2, MicroBatches::Samples(2));
    let empty = replicas.backward(&batch(0), |net, batch| (MEAN.micro)(net, &batch));
    assert_eq!(empty.expect_err("no sample"), Error::Batch(BatchError::Empty));
    let differ = replicas.backward(&batch(4), |net, (x, ..)| {
        let mean = net.logits(&x).mean(Kind::Double);
        let first = x.double_value(&[0, 0]) == numbers_there(&[4, 6], 100).double_value(&[0, 0]);
        if first { Loss::mean(mean) } else { Loss::sum(mean) }
    });
    assert_fails(differ, &["build the same loss"]);
    let step = replicas.backward(&batch(4), |net, batch| (MEAN.micro)(net, &batch));
    step.expect("the next step");
}
