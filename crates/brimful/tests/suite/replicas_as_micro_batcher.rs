//! Replicas support the features of a `MicroBatcher`: losses on all outputs, CUDA graphs, memory format.

use crate::support::full_batch::{
    Classifier, MEAN, assert_gradients, assert_loss, batch, devices, distance, plain, replicated,
};
use crate::support::{TOLERANCE, clear, test_device};
use brimful::memory::Arena;
use brimful::micro::MemoryFormat;
use brimful::{DeviceSpec, Loss, MicroBatches, Replicas};
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

/// Compares each sample with all others, at a temperature that only the loss uses.
fn contrastive(net: &Classifier, z: &Tensor) -> Tensor {
    let similar = z.matmul(&z.tr()) * net.scale.select(0, 1);
    similar.logsumexp([1_i64].as_slice(), false).mean(Kind::Double)
}

#[test]
fn a_loss_on_the_outputs_of_all_samples() {
    let (store, model) = plain(Classifier::new);
    for size in [MicroBatches::Samples(3), MicroBatches::Count(1), MicroBatches::Samples(1)] {
        let mut replicas = replicated(2, size);
        for samples in [1, 2, 13] {
            let what = format!("{samples} samples, {size:?}");
            let (x, ..) = batch(samples);
            clear(&store);
            clear(replicas.store());
            let outputs = model.layers.forward_t(&x, true);
            let expected = contrastive(&model, &outputs);
            expected.backward();
            let forward = |net: &Classifier, x: Tensor| net.layers.forward_t(&x, true);
            let step = replicas.backward_whole(&x, forward, contrastive).expect(&what);
            assert_loss(step.loss, &expected, &what);
            assert!(distance(&step.outputs, &outputs) < TOLERANCE, "{what}");
            assert_eq!(
                (step.samples as i64, step.sizes.iter().sum::<usize>() as i64),
                (samples, samples)
            );
            assert_gradients(&what, &store, replicas.store());
        }
    }
}

#[test]
fn the_peak_of_a_loss_on_all_outputs_is_that_of_all_passes() {
    const FREE: i64 = 4 << 20;
    let arena = Arena::limited("first", 16 * FREE as u64).expect("a limit");
    let devices = [DeviceSpec::cpu().threads(1).arena(arena), DeviceSpec::cpu().threads(1)];
    let net = |root: &nn::Path| nn::linear(root, 3, 2, Default::default());
    let mut replicas = Replicas::new(devices, MicroBatches::Samples(2), net).expect("replicas");
    let x = Tensor::ones([8, 3], (Kind::Float, Device::Cpu));
    let loss = |_: &nn::Linear, z: &Tensor| {
        let _room = Tensor::zeros([FREE], (Kind::Uint8, Device::Cpu));
        z.square().mean(Kind::Float)
    };
    let step = replicas.backward_whole(&x, |net, x: Tensor| net.forward(&x), loss);
    let peak = step.expect("a step").peaks[0].expect("an arena's");
    assert!(peak.0 > FREE as u64, "{peak}");
}

#[test]
fn a_loss_on_all_outputs_runs_in_the_users_order_where_the_one_on_trial_cannot() {
    let net = |root: &nn::Path| nn::conv2d(root, 3, 4, 3, Default::default());
    let replicas = Replicas::new(devices(2), MicroBatches::Samples(2), net).expect("replicas");
    let mut replicas = replicas.memory_format(MemoryFormat::Measured);
    let x = Tensor::ones([8, 3, 6, 6], (Kind::Float, Device::Cpu));
    for number in 0..8 {
        let step = replicas
            .backward(&x, |net, x: Tensor| Loss::mean(net.forward(&x).square().mean(Kind::Float)));
        step.expect("a step");
        let rows = |net: &nn::Conv2D, x: Tensor| {
            let out = net.forward(&x);
            // In channels-last format these rows are not contiguous.
            out.view([out.size()[0], -1])
        };
        let step = replicas.backward_whole(&x, rows, |_, rows| rows.square().mean(Kind::Float));
        let step = step.unwrap_or_else(|error| panic!("step {number}: {error}"));
        assert!(step.loss.is_finite(), "step {number}");
    }
}

#[test]
fn replayed_replicas_leave_the_full_batchs_gradient() {
    let (store, model) = plain(Classifier::new);
    let mut replicas = replicated(2, MicroBatches::Samples(4)).cuda_graphs(true);
    let cause = replicas.eager_cause().expect("threads").expect("a CPU is among them");
    assert!(cause.contains("CUDA"), "{cause}");
    let mut replayed = 0;
    for number in 0..6 {
        let (x, y, tokens) = batch(32);
        let whole = (x + f64::from(number), y, tokens);
        clear(&store);
        clear(replicas.store());
        (MEAN.full)(&model, &whole).backward();
        let step = replicas.backward(&whole, |net, batch| (MEAN.micro)(net, &batch));
        replayed += step.expect("a step").replayed;
        assert_gradients(&format!("step {number}"), &store, replicas.store());
    }
    assert_eq!(replayed > 0, test_device() != Device::Cpu, "{replayed} were replayed");
}

fn convolutions(root: &nn::Path) -> nn::SequentialT {
    let config = nn::ConvConfig { padding: 1, ..Default::default() };
    nn::seq_t()
        .add(nn::conv2d(root / "one", 3, 4, 3, config))
        .add_fn(|x| x.relu())
        .add(nn::conv2d(root / "two", 4, 2, 3, config))
        .add_fn(|x| x.mean_dim([2_i64, 3].as_slice(), false, Kind::Double))
}

#[test]
fn the_order_in_memory_changes_no_gradient() {
    let x = Tensor::arange(10 * 3 * 64, (Kind::Double, Device::Cpu)).sin().view([10, 3, 8, 8]);
    let x = x.to_device(test_device());
    for memory_format in [MemoryFormat::AsIs, MemoryFormat::ChannelsLast, MemoryFormat::Measured] {
        tch::manual_seed(1);
        let mut store = nn::VarStore::new(test_device());
        let model = convolutions(&store.root());
        store.double();
        model.forward_t(&x, true).square().mean(Kind::Double).backward();
        tch::manual_seed(1);
        let replicas =
            Replicas::new(devices(2), MicroBatches::Samples(2), convolutions).expect("replicas");
        let mut replicas = replicas.memory_format(memory_format);
        replicas.store_mut().double();
        for step in 0..8 {
            clear(replicas.store());
            let done = replicas.backward(&x, |net, x| {
                Loss::mean(net.forward_t(&x, true).square().mean(Kind::Double))
            });
            done.expect("a step");
            assert_gradients(&format!("{memory_format:?}, step {step}"), &store, replicas.store());
        }
    }
}
