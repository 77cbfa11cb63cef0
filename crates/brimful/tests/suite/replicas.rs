//! Replicas give exactly the gradient, loss, statistics and outputs of the plain model.

use crate::support::full_batch::{
    Batch, CASES, Case, Classifier, MEAN, OVER_TOKENS, SEVERAL_TERMS, assert_gradients,
    assert_loss, batch, devices, distance, losses, plain, replicated,
};
use crate::support::{TOLERANCE, Update, assert_fails, clear, numbers_there, test_device};
use brimful::batch::BatchError;
use brimful::nn::batch_norm1d;
use brimful::optim::{AdamW, Optimizer, Sgd};
use brimful::replicas::ReplicasError;
use brimful::{DeviceSpec, Error, Loss, MicroBatches, Replicas};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

#[test]
fn gradients_and_loss_are_the_full_batchs() {
    let (store, model) = plain(Classifier::new);
    for count in [2, 3] {
        for size in [
            MicroBatches::Samples(2),
            MicroBatches::Samples(5),
            MicroBatches::Count(3),
            MicroBatches::Samples(1000),
        ] {
            let mut replicas = replicated(count, size);
            if size == MicroBatches::Samples(5) {
                let speeds: Vec<f64> = (1..=count).map(|n| n as f64).collect();
                replicas.set_speeds(&speeds).expect("speeds");
            }
            for samples in [1, 2, 7, 20] {
                for Case { name, full, micro } in &CASES {
                    let what = format!("{name}, {samples} samples, {count} replicas, {size:?}");
                    let batch = batch(samples);
                    clear(&store);
                    clear(replicas.store());
                    let expected = full(&model, &batch);
                    expected.backward();
                    let micro = *micro;
                    let loss = move |net: &Classifier, batch: Batch| micro(net, &batch);
                    let step = replicas.backward(&batch, loss).expect(&what);
                    assert_loss(step.loss, &expected, &what);
                    assert_eq!(step.sizes.iter().sum::<usize>() as i64, samples);
                    assert_gradients(&what, &store, replicas.store());
                }
            }
        }
    }
}

#[test]
fn outputs_evaluation_and_maps_are_joined_in_sample_order() {
    let ((_, model), mut replicas) =
        (plain(Classifier::new), replicated(3, MicroBatches::Samples(2)));
    let batch = batch(11);
    let expected = tch::no_grad(|| model.logits(&batch.0));
    let step = replicas.backward(&batch, |net, (x, y, _)| {
        let logits = net.logits(&x);
        (Loss::mean(losses(&logits, &y).mean(Kind::Double)), logits)
    });
    let step = step.expect("a step");
    assert_eq!((step.shares, step.sizes), (vec![4, 4, 3], vec![2, 2, 2, 2, 2, 1]));
    assert!(distance(&step.outputs, &expected) < TOLERANCE);
    assert!(!step.outputs.requires_grad());
    let mapped = replicas.map(&batch.0, |net, x| net.logits(&x)).expect("a map");
    assert!(distance(&mapped, &expected) < TOLERANCE);
    for Case { name, full, micro } in &CASES {
        let micro = *micro;
        let loss = move |net: &Classifier, batch: Batch| micro(net, &batch);
        let step = replicas.evaluate(&batch, loss).expect(name);
        assert_loss(step.loss, &full(&model, &batch), name);
    }
}

fn parameters_of_all(replicas: &mut Replicas<Classifier>) -> Tensor {
    let samples = replicas.len() as i64;
    let ones = Tensor::ones([samples, 6], (Kind::Double, Device::Cpu));
    let all = replicas.map(&ones, |net, x| {
        let layers: Vec<Tensor> = (0..3).map(|i| net.scale.select(0, i).view([1, 1])).collect();
        Tensor::cat(&[net.logits(&x), Tensor::cat(&layers, 1)], 1)
    });
    all.expect("a row each")
}

#[test]
fn steps_of_any_optimizer_leave_the_plain_parameters_and_equal_replicas() {
    for clip in [None, Some(0.05)] {
        for method in
            [Sgd::new(0.1).momentum(0.9).into(), brimful::optim::Method::from(AdamW::new(0.01))]
        {
            let ((store, model), mut replicas) =
                (plain(Classifier::new), replicated(3, MicroBatches::Samples(3)));
            let mut plain = Optimizer::new(&store, method).expect("an optimizer");
            let mut other = Optimizer::new(replicas.store(), method).expect("an optimizer");
            let mut seeds = Vec::new();
            for step in 0..3 {
                let batch = batch(13 + step);
                (SEVERAL_TERMS.full)(&model, &batch).backward();
                let done =
                    replicas.backward(&batch, |net, batch| (SEVERAL_TERMS.micro)(net, &batch));
                seeds.push(done.expect("a step").seed);
                if let Some(norm) = clip {
                    plain.clip_gradient_norm(norm).expect("clipped");
                    other.clip_gradient_norm(norm).expect("clipped");
                }
                for optimizer in [&mut plain, &mut other] {
                    optimizer.update();
                }
                let rows = parameters_of_all(&mut replicas);
                // Parameters are equal; different devices round computed values differently.
                let rounding = if test_device() == Device::Cpu { 0.0 } else { 1e-12 };
                for row in 1..3 {
                    let off = distance(&rows.get(0), &rows.get(row));
                    assert!(off <= rounding, "replica {row} after step {step}: {off}");
                }
            }
            assert!(seeds.windows(2).all(|two| two[0] != two[1]), "a seed a step: {seeds:?}");
            let others = replicas.store().variables();
            for (name, variable) in store.variables() {
                let off = distance(&variable, &others[&name]);
                assert!(off < 1e-9, "{method:?} {clip:?}: {name} is {off} off");
            }
        }
    }
}

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
fn an_optimizer_of_tch_will_do() {
    use tch::nn::OptimizerConfig;
    let ((store, model), mut replicas) =
        (plain(Classifier::new), replicated(2, MicroBatches::Samples(4)));
    let mut plain = nn::Sgd::default().build(&store, 0.1).expect("an optimizer");
    let mut other = nn::Sgd::default().build(replicas.store(), 0.1).expect("an optimizer");
    for _ in 0..2 {
        let batch = batch(10);
        plain.zero_grad();
        other.zero_grad();
        (MEAN.full)(&model, &batch).backward();
        replicas.backward(&batch, |net, batch| (MEAN.micro)(net, &batch)).expect("a step");
        plain.step();
        other.step();
    }
    assert_gradients("the last", &store, replicas.store());
}

#[test]
fn a_frozen_and_loaded_first_replica_is_everyones() {
    let (mut store, model) = plain(Classifier::new);
    tch::no_grad(|| store.variables().into_values().for_each(|mut v| v.copy_(&(&v * 2.0))));
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.safetensors");
    store.save(&file).expect("saved");
    let mut replicas = replicated(2, MicroBatches::Samples(4));
    replicas.store_mut().load(&file).expect("loaded");
    let frozen = |store: &nn::VarStore| {
        let _itself = store.variables()["one.weight"].set_requires_grad(false);
    };
    frozen(&store);
    frozen(replicas.store());
    let batch = batch(10);
    (OVER_TOKENS.full)(&model, &batch).backward();
    replicas.backward(&batch, |net, batch| (OVER_TOKENS.micro)(net, &batch)).expect("a step");
    assert_gradients("frozen", &store, replicas.store());
    store.unfreeze();
    replicas.store_mut().unfreeze();
    clear(&store);
    clear(replicas.store());
    (OVER_TOKENS.full)(&model, &batch).backward();
    replicas.backward(&batch, |net, batch| (OVER_TOKENS.micro)(net, &batch)).expect("a step");
    assert_gradients("unfrozen", &store, replicas.store());
}

#[test]
fn deferred_statistics_are_those_of_all_samples() {
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
            let _whole = model.forward_t(&x, true);
            let step = replicas.backward(&x, |net, x| {
                Loss::mean(net.forward_t(&x, true).square().mean(Kind::Double))
            });
            step.expect("a step");
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
