//! A captured graph repeats its work on new inputs and with new random numbers, and a failed capture leaves
//! nothing behind.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0 … -- --test-threads=1` on a GPU; elsewhere the tests check the reported cause.

use crate::test_device::test_device;
use brimful_torch::graph::{Capture, Graph, Pool, available, record};
use brimful_torch::stream::{Event, Stream};
use brimful_torch::{ErrorKind, TorchError, autograd, memory, random};
use tch::{Device, Kind, Tensor};

/// Returns the device if work can be captured on it.
fn device() -> Option<Device> {
    let device = test_device();
    device.is_cuda().then_some(device)
}

/// Captures `f` on a new stream.
fn capture<T>(
    device: Device,
    pool: &mut Pool,
    f: impl FnOnce() -> Result<T, TorchError>,
) -> Result<(Graph, T), TorchError> {
    capture_on(Stream::urgent(device)?, pool, f)
}

fn capture_on<T>(
    aside: Stream,
    pool: &mut Pool,
    f: impl FnOnce() -> Result<T, TorchError>,
) -> Result<(Graph, T), TorchError> {
    record(aside, pool, f)
}

fn torch(error: tch::TchError) -> TorchError {
    TorchError { kind: ErrorKind::Other, message: error.to_string() }
}

fn used(device: Device) -> u64 {
    memory::device_memory(device).expect("figures").current
}

#[test]
fn without_cuda_the_cause_is_reported() {
    if device().is_some() {
        return available().expect("a machine with CUDA");
    }
    let error = Capture::begin(Device::Cpu, &Pool::default()).expect_err("a CPU has no streams");
    assert!(error.message.contains("CPU"), "{error}");
    if tch::Cuda::device_count() == 0 {
        let error = available().expect_err("no CUDA");
        assert!(error.message.starts_with("CUDA graphs are not available here: "), "{error}");
    }
}

#[test]
fn forward_and_backward_run_again_on_new_inputs() {
    let Some(device) = device() else { return };
    let options = (Kind::Double, device);
    let weight = Tensor::randn([5, 3], options).set_requires_grad(true);
    let mut input = Tensor::zeros([4, 5], options);
    let mut sum = Tensor::zeros([5, 3], options);
    let step = |x: &Tensor, sum: &mut Tensor| -> Result<Tensor, TorchError> {
        let mut weight = weight.shallow_clone();
        let loss = x.mm(&weight).tanh().square().sum(Kind::Double);
        autograd::backward(&[&loss], &[None], false)?;
        let _ = tch::no_grad(|| sum.g_add_(&weight.grad()));
        autograd::set_gradient(&mut weight, None)?;
        Ok(loss.detach())
    };
    let expected = |x: &Tensor| {
        let mut sum = Tensor::zeros([5, 3], options);
        (step(x, &mut sum).expect("eager"), sum)
    };
    let _warm = expected(&input);
    let mut pool = Pool::default();
    let (mut graph, loss) =
        capture(device, &mut pool, || step(&input, &mut sum)).expect("captured");
    for round in 1..4 {
        let x = Tensor::randn([4, 5], options);
        input.copy_(&x);
        let _ = sum.zero_();
        graph.replay().expect("replayed");
        let (expected_loss, expected_sum) = expected(&x);
        assert_eq!(loss, expected_loss, "round {round}");
        assert_eq!(sum, expected_sum, "round {round}");
    }
}

#[test]
fn random_numbers_are_those_of_an_eager_run() {
    let Some(device) = device() else { return };
    let ones = Tensor::ones([1000], (Kind::Float, device));
    let draw = || (ones.dropout(0.5, true), ones.dropout(0.25, true));
    let _warm = draw();
    let (mut graph, captured) =
        capture(device, &mut Pool::default(), || Ok(draw())).expect("captured");
    tch::Cuda::manual_seed_all(7);
    let start = random::generator_state(device).expect("a state");
    let eager: Vec<_> = (0..3).map(|_| draw()).collect();
    let after = Tensor::rand([8], (Kind::Float, device));
    random::set_generator_state(device, &start).expect("back");
    for (one, two) in &eager {
        graph.replay().expect("replayed");
        assert_eq!((&captured.0, &captured.1), (one, two));
    }
    assert_ne!(eager[0].0, eager[1].0);
    assert_eq!(Tensor::rand([8], (Kind::Float, device)), after);
}

#[test]
fn a_capture_that_fails_leaves_stream_memory_and_generator_as_they_were() {
    let Some(device) = device() else { return };
    let x = Tensor::ones([1 << 20], (Kind::Float, device));
    let host = Tensor::ones([4], (Kind::Float, Device::Cpu));
    let read = || (&x * 2.0).f_double_value(&[0]).map(drop).map_err(torch);
    let copy = || host.f_to_device(device).map(drop).map_err(torch);
    let other = || {
        // Work on a second stream that is forked from the first and never joined.
        let second = Stream::new(device)?;
        second.wait(&Event::after(Stream::current(device)?)?)?;
        let _inside = second.enter()?;
        x.f_exp().map(drop).map_err(torch)
    };
    let refused = || Err(TorchError { kind: ErrorKind::Other, message: "refused".into() });
    let causes: [&dyn Fn() -> Result<(), TorchError>; 4] = [&read, &copy, &other, &refused];
    let before = used(device);
    for (index, cause) in causes.iter().enumerate() {
        let mut pool = Pool::default();
        let dropout = || x.f_dropout(0.5, true).map(drop).map_err(torch);
        let result = capture(device, &mut pool, || dropout().and_then(|()| cause()));
        assert!(result.is_err(), "cause {index}");
        drop(result);
        // All of these still work: new memory, random numbers, a read, another capture.
        let drawn = Tensor::rand([16], (Kind::Float, device)).dropout(0.5, true);
        assert!(drawn.sum(Kind::Float).double_value(&[]).is_finite());
        let (mut graph, y) = capture(device, &mut pool, || Ok(&x + 1.0)).expect("captured");
        graph.replay().expect("replayed");
        assert_eq!(y.mean(Kind::Float).double_value(&[]), 2.0);
    }
    let panicked = std::panic::catch_unwind(|| {
        capture(device, &mut Pool::default(), || -> Result<(), _> { panic!("in a capture") })
    });
    assert!(panicked.is_err());
    assert_eq!(used(device), before);
    memory::empty_cache(device).expect("emptied");
    assert!(memory::device_memory(device).expect("figures").reserved <= before + (64 << 20));
}

#[test]
fn the_default_stream_is_refused_and_goes_on() {
    let Some(device) = device() else { return };
    let error = Capture::begin(device, &Pool::default()).expect_err("the default stream");
    assert!(error.message.contains("non-default stream"), "{error}");
    let x = Tensor::rand([4], (Kind::Float, device));
    assert!(x.sum(Kind::Float).double_value(&[]).is_finite());
}

#[test]
fn graphs_share_a_pool_and_give_it_back() {
    let Some(device) = device() else { return };
    memory::empty_cache(device).expect("emptied");
    let before = memory::device_memory(device).expect("figures");
    let x = Tensor::ones([16 << 20], (Kind::Float, device));
    let mut pool = Pool::default();
    let work = || Ok((&x + 1.0).exp().log().sum(Kind::Float));
    // Memory is reused only within a stream.
    let aside = Stream::urgent(device).expect("a stream");
    let (mut first, one) = capture_on(aside, &mut pool, work).expect("captured");
    let held = memory::device_memory(device).expect("figures").reserved;
    let (mut second, two) = capture_on(aside, &mut pool, work).expect("captured");
    assert_eq!(memory::device_memory(device).expect("figures").reserved, held);
    for _ in 0..3 {
        first.replay().expect("replayed");
        let one = one.double_value(&[]);
        second.replay().expect("replayed");
        assert_eq!(one, two.double_value(&[]));
    }
    drop((first, second, one, two, x));
    memory::empty_cache(device).expect("emptied");
    let after = memory::device_memory(device).expect("figures");
    assert!(after.reserved <= before.reserved + (8 << 20), "{before:?} {after:?}");
}

#[test]
fn a_capture_that_fails_in_a_shared_pool_leaves_the_pool_to_others() {
    let Some(device) = device() else { return };
    let x = Tensor::ones([1 << 10], (Kind::Float, device));
    let mut pool = Pool::default();
    let aside = Stream::urgent(device).expect("a stream");
    let (mut first, one) = capture_on(aside, &mut pool, || Ok(&x + 1.0)).expect("captured");
    for round in 0..3 {
        let read = || (&x * 2.0).f_double_value(&[0]).map(drop).map_err(torch);
        assert!(capture_on(aside, &mut pool, read).is_err());
        // Pinned memory is allocated as before, also on the failed capture's stream.
        let _inside = aside.enter().expect("entered");
        let host = Tensor::ones([4], (Kind::Float, Device::Cpu));
        drop(brimful_torch::transfer::pin(&host).expect("pinned"));
        let captured = capture_on(aside, &mut pool, || Ok(&x + 2.0));
        let (mut later, two) = captured.unwrap_or_else(|error| panic!("round {round}: {error}"));
        later.replay().expect("replayed");
        first.replay().expect("replayed");
        aside.synchronize().expect("done");
        assert_eq!(one.mean(Kind::Float).double_value(&[]), 2.0);
        drop(two);
    }
}

#[test]
fn a_device_that_is_not_the_current_one_can_be_captured() {
    let Some(Device::Cuda(_)) = device().filter(|_| tch::Cuda::device_count() > 1) else { return };
    // The thread's current device is the first one.
    let device = Device::Cuda(1);
    let x = Tensor::ones([4], (Kind::Float, device));
    let (mut graph, y) = capture(device, &mut Pool::default(), || Ok(&x + 1.0)).expect("captured");
    graph.replay().expect("replayed");
    assert_eq!(y.mean(Kind::Float).double_value(&[]), 2.0);
}
