//! Pending work of an accelerator is waited for, on any stream, and copies stay on their own streams.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` on a GPU. A CPU has no queue, and must give the same results.

use crate::support::{
    assert_all_close, assert_close, assert_within, copies, fill, gradients, numbers, test_device,
};
use brimful::nn::{Projection, ProjectionConfig, kernels};
use brimful::{DeviceSpec, Layers, Loss, MicroBatcher, MicroBatches, Pipeline, Replicas};
use brimful_torch::device::synchronize;
use brimful_torch::memory::device_memory;
use brimful_torch::stream::{Event, Stream};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

const SAMPLES: i64 = 12;
const WIDTH: i64 = 8;

fn samples(seed: i64) -> Tensor {
    numbers(&[SAMPLES, WIDTH], seed)
}

/// Returns the numbers in a device tensor that holds zeros until earlier work is done, which takes some tenths of
/// a second.
fn late(numbers: &Tensor) -> Tensor {
    let device = test_device();
    let here = numbers.to_device(device);
    let mut there = here.zeros_like();
    if device.is_cuda() {
        let mut long = Tensor::zeros([4096, 4096], (Kind::Float, device));
        synchronize(device).expect("a device");
        for _ in 0..100 {
            long = long.matmul(&long);
        }
    }
    there.copy_(&here);
    there
}

/// Runs `f` on the default stream, and on another one.
fn on_each_stream(mut f: impl FnMut(&str)) {
    f("the common stream");
    let _inside = Stream::new(test_device()).expect("a stream").enter().expect("entered");
    f("a stream of its own");
}

fn stages() -> Vec<[Device; 2]> {
    let (host, there) = (Device::Cpu, test_device());
    vec![[host, there], [there, host], [there, there], [host, host]]
}

fn squares(out: Tensor, y: &Tensor) -> Loss {
    Loss::mean((out - y).square().mean(Kind::Double))
}

#[test]
fn a_pipeline_waits_for_inputs_and_targets() {
    let linear = |p: &nn::Path| nn::linear(p, WIDTH, WIDTH, Default::default());
    for devices in stages() {
        tch::manual_seed(1);
        let layers = Layers::new().add("one", linear).add("two", linear);
        let mut pipe = Pipeline::builder(layers)
            .devices(devices.map(|device| DeviceSpec::from(device).threads(1)))
            .kind(Kind::Double)
            .micro_batches(MicroBatches::Count(3))
            .build()
            .expect("a pipeline");
        let (x, y) = (samples(1), samples(2));
        let out = pipe.map(&x, |out: Tensor| out).expect("an evaluation");
        let loss = pipe.backward(&x, &y, squares).expect("a step").loss;
        let gradients = copies(&pipe.gradients().expect("gradients"));
        on_each_stream(|stream| {
            let what = format!("{devices:?}, {stream}");
            pipe.zero_grad().expect("cleared");
            let got = pipe.map(&late(&x), |out: Tensor| out).expect("an evaluation");
            assert_all_close(&got, &out, &format!("{what}: the output"));
            let step = pipe.backward(&late(&x), &y, squares).expect("a step");
            assert!((step.loss - loss).abs() < 1e-10, "{what}: {} not {loss}", step.loss);
            assert_close(&pipe.gradients().expect("gradients"), &gradients, &what);
            let step = pipe.backward(&x, &late(&y), squares).expect("a step");
            assert!((step.loss - loss).abs() < 1e-10, "{what}: targets, {}", step.loss);
            // A gradient of the outputs that is still being computed.
            pipe.zero_grad().expect("cleared");
            let out = pipe.forward(&x).expect("a forward");
            (&*out - late(&y).to_device(out.device())).square().mean(Kind::Double).backward();
            pipe.backward_from(out).expect("a backward");
            let found = pipe.gradients().expect("gradients");
            assert_close(&found, &gradients, &format!("{what}: of all outputs"));
        });
    }
}

#[test]
fn replicas_wait_for_a_batch() {
    for devices in [vec![test_device(), Device::Cpu], vec![Device::Cpu, Device::Cpu]] {
        tch::manual_seed(1);
        let what = format!("{devices:?}");
        let devices = devices.into_iter().map(|device| DeviceSpec::from(device).threads(1));
        let build = |root: &nn::Path| nn::linear(root, WIDTH, WIDTH, Default::default());
        let mut replicas =
            Replicas::new(devices, MicroBatches::Samples(2), build).expect("replicas");
        replicas.store_mut().double();
        let x = samples(1);
        let out = replicas.map(&x, |net, x| net.forward(&x)).expect("a map");
        on_each_stream(|stream| {
            let got = replicas.map(&late(&x), |net, x| net.forward(&x)).expect("a map");
            assert_all_close(&got, &out, &format!("{what}, {stream}"));
            let loss = |net: &nn::Linear, x: Tensor| {
                Loss::mean(net.forward(&x).square().mean(Kind::Double))
            };
            replicas.store().variables().values_mut().for_each(Tensor::zero_grad);
            replicas.backward(&late(&x), loss).expect("a step");
            let expected = out.square().mean(Kind::Double);
            let step = replicas.evaluate(&late(&x), loss).expect("an evaluation");
            assert!((step.loss - expected.double_value(&[])).abs() < 1e-10, "{what}, {stream}");
        });
    }
}

#[test]
fn a_micro_batcher_waits_for_a_batch() {
    // From this device to the host, and from another accelerator if there is one.
    let mut devices = vec![Device::Cpu, test_device()];
    if test_device().is_cuda() && tch::Cuda::device_count() > 1 {
        devices.push(Device::Cuda(1));
    }
    for device in devices {
        let mut store = nn::VarStore::new(device);
        let layer = nn::linear(store.root(), WIDTH, WIDTH, Default::default());
        store.double();
        let x = samples(1);
        let out = tch::no_grad(|| layer.forward(&x.to_device(device)));
        let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
        on_each_stream(|stream| {
            // A part of the batch is on another device, so all of it is transferred.
            let batch = (late(&x), x.shallow_clone());
            let (got, same) =
                micro.map(&batch, |(late, x)| (layer.forward(&late), late - x)).expect("a map");
            assert_all_close(&got, &out, &format!("{device:?}, {stream}"));
            assert_all_close(&same, &same.zeros_like(), &format!("{device:?}, {stream}"));
        });
    }
}

/// Returns the gradients of a projection that is used on the current and on another stream, where the backward
/// takes some tenths of a second.
fn gradients_of_two_streams() -> Vec<(String, Tensor)> {
    let device = test_device();
    let (rows, times) = if device.is_cuda() { (4096, 50) } else { (16, 1) };
    let store = nn::VarStore::new(device);
    let config = ProjectionConfig { spread: 1.0, bias: true, inputs_first: false };
    let layer = Projection::new(&store.root(), WIDTH, WIDTH, config);
    fill(&store);
    let x = numbers(&[rows, WIDTH], 1).to_kind(Kind::Float).to_device(device);
    let one = Tensor::eye(rows, (Kind::Float, device));
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(rows as usize));
    let step = micro.backward(&x, |x| {
        let main = Stream::current(device).expect("a stream");
        let other = Stream::new(device).expect("a stream");
        let here = layer.forward(&x);
        other.wait(&Event::after(main).expect("an event")).expect("it waits");
        let inside = other.enter().expect("entered");
        let there = layer.forward(&x).repeat([1, rows / WIDTH]);
        let there = (0..times).fold(there, |there, _| there.matmul(&one)).narrow(1, 0, WIDTH);
        drop(inside);
        main.wait(&Event::after(other).expect("an event")).expect("it waits");
        main.record_stream(&there).expect("kept");
        Loss::mean((here + there * 2.0).square().mean(Kind::Float))
    });
    step.expect("a step");
    copies(&gradients(&store))
}

#[test]
fn a_layer_on_two_streams_has_the_gradient_of_both_uses() {
    let ours = gradients_of_two_streams();
    kernels::set_enabled(false);
    let theirs = gradients_of_two_streams();
    kernels::set_enabled(true);
    assert_within(&ours, &theirs, 1e-3, "two streams");
}

/// Memory used on a stream stays with it: a new pool stream at every step would reserve memory for dozens of
/// micro-batches more.
#[test]
fn steps_do_not_reserve_more_and_more_for_inputs() {
    let device = test_device();
    if !device.is_cuda() {
        return;
    }
    const BYTES: i64 = 32 << 20;
    let x = Tensor::ones([4, BYTES / 4], (Kind::Float, Device::Cpu));
    let reserved = || {
        synchronize(device).expect("a device");
        device_memory(device).expect("figures").reserved
    };
    let grown = |step: &mut dyn FnMut()| {
        (0..3).for_each(|_| step());
        let before = reserved();
        (0..40).for_each(|_| step());
        reserved().saturating_sub(before)
    };
    let store = nn::VarStore::new(device);
    let weight = store.root().ones("weight", &[]);
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(1));
    let fed = grown(&mut || {
        let loss = |x: Tensor| Loss::mean((x.mean(Kind::Float)) * &weight);
        micro.backward(&x, loss).expect("a step");
    });
    assert!(fed < 8 * BYTES as u64, "a batcher: {fed}");
    let layers = Layers::new()
        .add("one", |p| {
            let weight = p.ones("weight", &[]);
            nn::func(move |x| x.mean_dim(1, false, Kind::Float) * &weight)
        })
        .add_fn("two", |x| x * 2.0);
    let mut pipe = Pipeline::builder(layers)
        .devices([device, device])
        .micro_batches(MicroBatches::Count(4))
        .build()
        .expect("one");
    let taken = grown(&mut || {
        let sum = |out: Tensor, _: &Tensor| Loss::mean(out.mean(Kind::Float));
        pipe.backward(&x, &x.narrow(1, 0, 1), sum).expect("a step");
    });
    assert!(taken < 8 * BYTES as u64, "a pipeline: {taken}");
}
