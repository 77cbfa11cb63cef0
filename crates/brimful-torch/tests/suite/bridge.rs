//! Compares the bridge's additions to tch with longer ways to do the same in tch.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU; then use `--test-threads=1`.

use crate::test_device::test_device;
use brimful_torch::stream::{Event, Stream};
use brimful_torch::{
    ErrorKind, autograd, device, libtorch, memory, memory_format, random, threads, transfer,
};
use tch::{Device, Kind, Tensor};

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, test_device())).set_requires_grad(true)
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

#[test]
fn several_roots_run_backward_at_once() {
    let (x, g) = (leaf(&[5]), Tensor::randn([5], (Kind::Double, test_device())));
    let both = (x.sin() * &g).sum(Kind::Double) + x.exp().sum(Kind::Double);
    let expected = Tensor::run_backward(&[both], &[&x], false, false);
    let shared = &x * 1.0;
    let roots = [&shared.sin(), &shared.exp().sum(Kind::Double)];
    autograd::backward(&roots, &[Some(&g), None], false).expect("backward");
    assert!(difference(&x.grad(), &expected[0]) < 1e-15);
}

#[test]
fn a_kept_graph_runs_again_and_a_freed_one_refuses() {
    let x = leaf(&[3]);
    let y = x.exp().sum(Kind::Double);
    autograd::backward(&[&y], &[None], true).expect("kept");
    autograd::backward(&[&y], &[None], false).expect("again");
    assert!(difference(&x.grad(), &(x.exp() * 2.0)) < 1e-15);
    let error = autograd::backward(&[&y], &[None], false).expect_err("the graph is freed");
    assert_eq!(error.kind, ErrorKind::Other);
    assert!(error.message.contains("backward through the graph a second time"), "{error}");
}

#[test]
fn unequal_lists_and_wrong_shapes_are_errors() {
    let x = leaf(&[3]);
    let error = autograd::backward(&[&x], &[], false).expect_err("no gradient");
    assert!(error.message.contains("1 and 0"), "{error}");
    let wrong = Tensor::ones([4], (Kind::Double, test_device()));
    assert!(autograd::backward(&[&x.exp()], &[Some(&wrong)], false).is_err());
    assert!(autograd::set_gradient(&mut leaf(&[3]), Some(&wrong)).is_err());
}

#[test]
fn a_gradient_can_be_put_in_place_and_taken_away() {
    let mut x = leaf(&[3]);
    let g = Tensor::ones([3], (Kind::Double, test_device()));
    autograd::set_gradient(&mut x, Some(&g)).expect("put");
    assert_eq!(x.grad().data_ptr(), g.data_ptr());
    autograd::set_gradient(&mut x, None).expect("taken");
    assert!(!x.grad().defined());
}

#[test]
fn a_thread_count_holds_for_its_thread_until_dropped() {
    let before = threads::threads();
    let guard = threads::limit_threads(1);
    assert_eq!(threads::threads(), 1);
    let elsewhere = std::thread::spawn(threads::threads).join().expect("thread");
    assert_eq!(elsewhere, before);
    drop(guard);
    assert_eq!(threads::threads(), before);
}

#[test]
fn thread_counts_may_be_dropped_in_any_order() {
    let before = threads::threads();
    let (outer, inner) = (threads::limit_threads(2), threads::limit_threads(3));
    drop(outer);
    assert_eq!(threads::threads(), 3, "the inner one still holds");
    drop(inner);
    assert_eq!(threads::threads(), before);
}

#[test]
fn a_thread_count_holds_where_no_thread_can_be_started() {
    let set = "BRIMFUL_TEST_NO_THREADS";
    if std::env::var_os(set).is_none() {
        let this = std::env::current_exe().expect("this program");
        let ended = std::process::Command::new(this)
            .args(["--exact", "bridge::a_thread_count_holds_where_no_thread_can_be_started"])
            // No machine has enough memory for a thread stack of this size.
            .envs([(set, "1"), ("RUST_MIN_STACK", "1125899906842624")])
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&ended.stdout).into_owned();
        return assert!(ended.status.success() && said.contains("1 passed"), "{said}");
    }
    assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "there are none");
    let before = threads::threads();
    let guard = threads::limit_threads(before + 1);
    assert_eq!(threads::threads(), before + 1);
    drop(guard);
    assert_eq!(threads::threads(), before);
}

#[test]
fn streams_may_be_left_in_any_order() {
    let device = test_device();
    let main = Stream::current(device).expect("now");
    let [one, other] = [(); 2].map(|()| Stream::new(device).expect("new"));
    let (outer, inner) = (one.enter().expect("enter"), other.enter().expect("enter"));
    drop(outer);
    assert_eq!(Stream::current(device).expect("now"), other, "the inner one still holds");
    drop(inner);
    assert_eq!(Stream::current(device).expect("now"), main);
}

#[test]
fn a_transfer_on_its_own_stream_arrives_whole() {
    let device = test_device();
    let host = Tensor::arange(1 << 16, (Kind::Float, Device::Cpu));
    let pinned = transfer::pin(&host).expect("pin");
    let (copies, main) = (Stream::new(device).expect("new"), Stream::current(device).expect("now"));
    let mut arrived = Event::new(device).expect("event");
    let there = {
        let _copying = copies.enter().expect("enter");
        let there = transfer::send(&pinned, device).expect("send");
        arrived.record(copies).expect("record");
        there
    };
    main.wait(&arrived).expect("wait");
    main.record_stream(&there).expect("keep");
    assert_eq!(Stream::current(device).expect("now"), main);
    assert_eq!((there * 2.0).to_device(Device::Cpu), host * 2.0);
    copies.synchronize().expect("synchronize");
    arrived.synchronize().expect("synchronize");
    device::synchronize(device).expect("synchronize");
}

#[test]
fn a_tensor_sent_to_the_host_is_there() {
    // Computing takes longer than the host takes to read the result.
    let size = if test_device() == Device::Cpu { 1 << 6 } else { 1 << 12 };
    let x = Tensor::eye(size, (Kind::Double, test_device()));
    let product = (0..20).fold(x.shallow_clone(), |product, _| product.matmul(&x));
    let here = transfer::send(&product, Device::Cpu).expect("sent");
    assert_eq!(here, Tensor::eye(size, (Kind::Double, Device::Cpu)));
}

#[test]
fn a_copy_into_the_hosts_memory_is_there_when_its_event_is_reached() {
    let device = test_device();
    let there = Tensor::arange(1 << 20, (Kind::Float, device)) * 3.0;
    let room = transfer::empty_pinned(&there).expect("memory");
    assert_eq!((room.device(), room.size(), room.kind()), (Device::Cpu, there.size(), Kind::Float));
    transfer::copy(&room, &there).expect("copied");
    let mut arrived = Event::new(device).expect("event");
    arrived.record(Stream::current(device).expect("now")).expect("record");
    arrived.synchronize().expect("synchronize");
    assert!(arrived.is_reached().expect("known"));
    assert_eq!(room, there.to_device(Device::Cpu));
    // Also with another dtype and memory format.
    let half = there.view([1 << 10, 1 << 10]).tr().to_kind(Kind::BFloat16);
    let room = transfer::empty_pinned(&half.to_kind(Kind::Double)).expect("memory");
    transfer::copy(&room, &half).expect("copied");
    device::synchronize(device).expect("synchronize");
    assert_eq!(room, half.to_device(Device::Cpu).to_kind(Kind::Double));
    assert!(transfer::copy(&room, &there).is_err(), "another shape");
}

#[test]
fn an_empty_pinned_tensor_has_its_channels_where_it_has_them() {
    let plain = Tensor::arange(120, (Kind::Float, test_device())).view([2, 3, 4, 5]);
    let last = memory_format::to_memory_format(&plain, true).expect("memory");
    for tensor in [&plain, &last] {
        let room = transfer::empty_pinned_like(tensor).expect("memory");
        assert_eq!((room.size(), room.stride()), (tensor.size(), tensor.stride()));
        transfer::copy(&room, tensor).expect("copied");
        device::synchronize(test_device()).expect("synchronize");
        let back = transfer::send(&room, test_device()).expect("sent");
        assert_eq!((&back, back.stride()), (tensor, tensor.stride()));
    }
    assert_eq!(transfer::empty_pinned(&last).expect("memory").stride(), plain.stride());
}

#[test]
fn events_measure_time_on_an_accelerator_alone() {
    let device = test_device();
    let stream = Stream::current(device).expect("now");
    let (mut start, mut end) = (Event::new(device).expect("a"), Event::new(device).expect("b"));
    start.record(stream).expect("record");
    let x = Tensor::ones([512, 512], (Kind::Float, device));
    let _ = x.matmul(&x);
    end.record(stream).expect("record");
    end.synchronize().expect("synchronize");
    assert_eq!(start.elapsed(&end).is_ok(), device != Device::Cpu);
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let missing = Device::Cuda(99);
    let messages = [
        device::synchronize(missing).expect_err("synchronize").message,
        random::generator_state(missing).expect_err("state").message,
        Stream::new(missing).expect_err("stream").message,
        Event::new(missing).expect_err("event").message,
        memory::device_memory(missing).expect_err("memory").message,
        memory::empty_cache(missing).expect_err("cache").message,
    ];
    for message in messages {
        assert_eq!(message, "there is no device Cuda(99) here");
    }
    assert!(memory::reset_peak(Device::Cpu).expect_err("a CPU").message.contains("use an arena"));
}

#[test]
fn the_running_libtorch_is_the_one_we_are_built_for() {
    assert_eq!(libtorch::version().as_deref(), Some(libtorch::EXPECTED_VERSION));
    assert!(libtorch::library_path().expect("a path").ends_with("libtorch_cpu.so"));
}

#[test]
fn a_watched_backward_tells_of_each_gradient_when_it_is_complete() {
    let options = (Kind::Double, Device::Cpu);
    let parameters: Vec<Tensor> =
        (1..=3).map(|n| Tensor::full([2], n as f64, options).set_requires_grad(true)).collect();
    let unused = Tensor::ones([2], options).set_requires_grad(true);
    // The second parameter is used twice.
    let hidden = &parameters[0] * &parameters[1];
    let loss = (hidden * &parameters[1] * &parameters[2]).sum(Kind::Double);
    let all = parameters.iter().chain([&unused]);
    let watched: Vec<Tensor> = all.map(Tensor::shallow_clone).collect();
    let mut told = Vec::new();
    let listen = |place: usize| told.push((place, watched[place].grad().double_value(&[0])));
    let run = || autograd::backward(&[&loss], &[None], false);
    autograd::watched(&watched, listen, run).expect("a backward");
    told.sort_by_key(|(place, _)| *place);
    assert_eq!(told, [(0, 12.0), (1, 12.0), (2, 4.0)]);

    let again = (&parameters[0] * 2.0).sum(Kind::Double);
    autograd::watched(
        &[],
        |_| panic!("nobody is watched"),
        || autograd::backward(&[&again], &[None], false),
    )
    .expect("a backward");
    let thrown = std::panic::catch_unwind(|| {
        let loss = (&parameters[2] * 2.0).sum(Kind::Double);
        let run = || autograd::backward(&[&loss], &[None], false);
        let _ = autograd::watched(&parameters, |_| panic!("heard"), run);
    });
    assert_eq!(thrown.expect_err("a panic").downcast_ref::<&str>(), Some(&"heard"));
}
