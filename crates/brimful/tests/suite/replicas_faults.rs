//! A failure on any replica leaves everything unchanged, no thread hangs, and the next step works.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::state::{dropout_layers, loss_of, samples, state};
use crate::support::{assert_fails, assert_same, assert_threads};
use brimful::NonFinitePolicy;
use brimful::memory::Arena;
use brimful::{DeviceSpec, Error, Loss, MicroBatches, Replicas};
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

fn batch() -> Tensor {
    samples(12)
}

fn loss(net: &nn::SequentialT, x: &Tensor) -> Loss {
    loss_of(&net.forward_t(x, true))
}

/// Makes replicas in these arenas, whose parameters already have gradients.
fn replicas(arenas: &[Arena], size: MicroBatches) -> Replicas<nn::SequentialT> {
    tch::manual_seed(1);
    let devices = arenas.iter().map(|arena| DeviceSpec::cpu().threads(1).arena(arena.clone()));
    let mut replicas = Replicas::new(devices, size, dropout_layers).expect("replicas");
    replicas.store_mut().double();
    replicas.backward(&batch(), |net, x| loss(net, &x)).expect("an earlier step");
    replicas
}

fn arenas(count: usize) -> Vec<Arena> {
    (0..count).map(|number| Arena::new(&format!("replica {number}"))).collect()
}

fn in_two_passes(replicas: &mut Replicas<nn::SequentialT>) -> brimful::Result<()> {
    let forward = |net: &nn::SequentialT, x: Tensor| net.forward_t(&x, true);
    let of_all = |_: &nn::SequentialT, z: &Tensor| {
        z.matmul(&z.tr()).logsumexp([1_i64], false).sum(Kind::Double)
    };
    replicas.backward_whole(&batch(), forward, of_all).map(drop)
}

fn wide(root: &nn::Path) -> nn::Linear {
    nn::linear(root / "wide", 300, 300, Default::default())
}

#[test]
fn the_smallest_memory_decides_for_all() {
    let small = Arena::limited("small", 2 << 20).expect("a limit");
    let devices = [DeviceSpec::cpu().threads(1), DeviceSpec::cpu().threads(1).arena(small)];
    let mut replicas = Replicas::new(devices, MicroBatches::Largest, wide).expect("replicas");
    let x = Tensor::randn([2048, 300], (Kind::Float, Device::Cpu));
    let run = |net: &nn::Linear, x: Tensor| Loss::mean(net.forward(&x).square().mean(Kind::Float));
    let mut last = 0;
    for _ in 0..4 {
        let step = replicas.backward(&x, run).expect("it fits in parts");
        assert!(step.peaks[1].is_some_and(|peak| peak.0 <= 2 << 20), "{:?}", step.peaks);
        last = step.sizes[0];
        assert!(step.sizes.iter().all(|&size| size.abs_diff(last) <= 1), "{:?}", step.sizes);
    }
    assert!(last < 1024, "1024 samples do not fit 2 MiB");

    let tiny = Arena::limited("tiny", 2 << 20).expect("a limit");
    let devices = [DeviceSpec::cpu().threads(1), DeviceSpec::cpu().threads(1).arena(tiny.clone())];
    let mut replicas = Replicas::new(devices, MicroBatches::Auto, wide).expect("replicas");
    let before = state(replicas.store());
    tiny.set_limit(Some(tiny.current() + 1000)).expect("a limit");
    let error = replicas.backward(&x, run).expect_err("not even one sample fits");
    assert!(matches!(error, Error::DoesNotFit { .. }), "{error}");
    assert_same("does not fit", &before, &state(replicas.store()));
    tiny.set_limit(None).expect("no limit");
    replicas.backward(&x, run).expect("now it fits");
}

/// Returns the error or the panic of a step on two replicas in which `f` transforms the last micro-batch's
/// outputs. Checks that the state is unchanged, and that the next step works.
fn ended_by_the_last(
    policy: NonFinitePolicy,
    f: fn(Tensor) -> Result<Tensor, &'static str>,
) -> thread::Result<Error> {
    let mut replicas = replicas(&arenas(2), MicroBatches::Samples(3)).non_finite(policy);
    let before = state(replicas.store());
    let last = batch().double_value(&[11, 3]);
    let ended = panic::catch_unwind(AssertUnwindSafe(|| {
        replicas.backward(&batch(), move |net, x| {
            let out = net.forward_t(&x, true);
            let is_last = x.double_value(&[-1, 3]) == last;
            Ok::<_, &'static str>(loss_of(&if is_last { f(out)? } else { out }))
        })
    }));
    assert_same("a failure", &before, &state(replicas.store()));
    replicas.backward(&batch(), |net, x| loss(net, &x)).expect("the next step");
    ended.map(|step| step.expect_err("it fails"))
}

#[test]
fn what_is_not_finite_on_one_replica_is_refused_on_all() {
    let loss = ended_by_the_last(NonFinitePolicy::RefuseLoss, |out| Ok(out * f64::NAN));
    // The root of 0 is finite; its slope is not.
    let slope = ended_by_the_last(NonFinitePolicy::RefuseGradients, |out| Ok((out * 0.0).sqrt()));
    for ended in [loss, slope] {
        assert_fails(Err::<(), _>(ended.expect("no panic")), &["micro-batch 3"]);
    }
}

#[test]
fn gradients_that_are_finite_on_each_replica_are_not_committed_where_their_sum_is_not() {
    let build = |root: &nn::Path| root.ones("weight", &[1]);
    let devices = [DeviceSpec::cpu().threads(1), DeviceSpec::cpu().threads(1)];
    let replicas = Replicas::new(devices, MicroBatches::Samples(1), build).expect("replicas");
    let mut replicas = replicas.non_finite(NonFinitePolicy::RefuseGradients);
    replicas.store_mut().half();
    let x = Tensor::full([2, 1], 4e4, (Kind::Half, Device::Cpu));
    let sum = |out: Tensor| out.to_kind(Kind::Float).sum(Kind::Float);
    let one = replicas.backward(&x, move |weight, x| Loss::sum(sum(x * weight))).map(drop);
    let two = replicas
        .backward_whole(&x, |weight, x| x * weight, move |_, out: &Tensor| sum(out.shallow_clone()))
        .map(drop);
    for ended in [one, two] {
        assert_fails(ended, &["'weight' is not finite in Half"]);
        assert!(!replicas.store().variables()["weight"].grad().defined());
    }
}

#[test]
fn a_loss_over_the_whole_mini_batch_is_held_to_finite_gradients_too() {
    let arenas = arenas(2);
    let mut replicas =
        replicas(&arenas, MicroBatches::Samples(3)).non_finite(NonFinitePolicy::RefuseGradients);
    let before = state(replicas.store());
    let forward = |net: &nn::SequentialT, x: Tensor| net.forward_t(&x, true);
    // The root of 0 is finite; its slope is not.
    let root = |_: &nn::SequentialT, out: &Tensor| (out * 0.0).sqrt().sum(Kind::Double);
    assert_fails(replicas.backward_whole(&batch(), forward, root), &["is not finite in Double"]);
    assert_same("refused", &before, &state(replicas.store()));
    in_two_passes(&mut replicas).expect("the next step");
}

#[test]
fn threads_end_where_a_model_cannot_be_built() {
    assert_threads(0);
    let builds = AtomicUsize::new(0);
    let broken = move |root: &nn::Path| {
        assert!(builds.fetch_add(1, Ordering::SeqCst) == 0, "no second model");
        wide(root)
    };
    let cpus = [DeviceSpec::cpu().threads(1), DeviceSpec::cpu().threads(1)];
    assert_fails(Replicas::new(cpus, MicroBatches::Samples(1), broken), &["no second model"]);
    assert_threads(0);
}

#[test]
fn sums_do_not_depend_on_the_threads_timing() {
    let run = |slow: usize| {
        tch::manual_seed(1);
        let cpus = (0..3).map(|_| DeviceSpec::cpu().threads(1));
        let mut replicas =
            Replicas::new(cpus, MicroBatches::Samples(2), dropout_layers).expect("replicas");
        replicas.set_speeds(&[1.0; 3]).expect("speeds");
        let starts: Vec<f64> = (0..3).map(|r| batch().double_value(&[4 * r, 0])).collect();
        let x = batch().to_kind(Kind::Float);
        for _ in 0..3 {
            let starts = starts.clone();
            let step = replicas.backward(&x, move |net, x| {
                if (x.double_value(&[0, 0]) - starts[slow]).abs() < 1e-6 {
                    thread::sleep(Duration::from_millis(20));
                }
                Loss::mean(net.forward_t(&x, true).square().mean(Kind::Float))
            });
            step.expect("a step");
        }
        state(replicas.store())
    };
    let expected = run(0);
    for slow in 1..3 {
        assert_same("another timing", &expected, &run(slow));
    }
}
