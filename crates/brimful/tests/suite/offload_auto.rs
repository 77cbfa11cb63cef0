//! Automatic offload judges the pipeline that it builds: its micro-batches, balance, schedule and memory.

use crate::support::{Update, assert_fails, numbers, test_device};
use brimful::internal::OffloadPlan;
use brimful::memory::Arena;
use brimful::nn::{BatchNormConfig, BatchNormPolicy, batch_norm1d};
use brimful::optim::Adam;
use brimful::pipeline::{BalanceBy, Builder, Offload};
use brimful::schedule::Schedule;
use brimful::{Bytes, DeviceSpec, Layers, Loss, MicroBatches, Pipeline};
use tch::{Device, Kind, Tensor, nn};

/// Samples of a mini-batch and of the measured micro-batch.
const BATCH: i64 = 64;
const SAMPLE: i64 = 16;

/// Less than the weights, gradients and Adam's state of [`deep`], 800 kB, and more than all of this.
const SMALL: u64 = 600_000;
const LARGE: u64 = 1 << 30;

fn linear(width: i64) -> impl Fn(&nn::Path) -> nn::Linear + Send + Sync {
    move |p| nn::linear(p, width, width, Default::default())
}

/// Twelve equal layers.
fn deep() -> Layers {
    (0..12).fold(Layers::new(), |layers, n| layers.add(format!("block{n}"), linear(64)))
}

/// Two layers with weights, each of which takes 264 kB with gradients and Adam's state, and two without.
fn uneven() -> Layers {
    let layers = Layers::new().add("one", linear(128)).add("two", linear(128));
    layers.add_fn("three", Tensor::tanh).add_fn("four", Tensor::tanh)
}

fn mean_square(out: &Tensor, x: &Tensor) -> Tensor {
    (out - x).square().mean(Kind::Float)
}

fn rows(count: i64, width: i64) -> Tensor {
    numbers(&[count, width], 1).to_kind(Kind::Float)
}

/// Plans for so many bytes of each device.
fn auto(layers: Layers, width: i64, gpu: u64) -> Builder {
    let sample = rows(SAMPLE, width);
    let device = DeviceSpec::from(test_device()).threads(1);
    Pipeline::builder(layers)
        .devices([device])
        .offload(Offload::Auto { gpu: Some(Bytes(gpu)), host: Some(Bytes(1 << 30)) })
        .sample((&sample, &sample), mean_square, BATCH as usize)
        .micro_batches(MicroBatches::Count(4))
        .reserve(Adam::new(0.1))
}

fn build(builder: Builder) -> Pipeline {
    builder.build().expect("a pipeline")
}

fn offloaded(pipe: &Pipeline) -> usize {
    pipe.offloaded_stages().expect("a number")
}

#[test]
fn the_number_of_micro_batches_does_not_depend_on_free_memory() {
    let default = Pipeline::builder(deep()).build().expect("a pipeline").micro_batches();
    assert_eq!(default, MicroBatches::Count(1));
    let cuts = [
        (default, 1),
        (MicroBatches::Count(2), 2),
        (MicroBatches::Count(100), 64),
        (MicroBatches::Samples(8), 8),
    ];
    for (cut, count) in cuts {
        for gpu in [SMALL, LARGE] {
            let builder = || auto(deep(), 64, gpu).micro_batches(cut);
            let mut pipe = build(builder());
            assert_eq!(pipe.micro_batches(), cut, "{gpu} bytes");
            assert_eq!(offloaded(&pipe) > 0, gpu == SMALL, "{cut:?}");
            if let OffloadPlan::Planned { row, .. } =
                builder().plan_offload(0, |_| {}).expect("a plan")
            {
                assert_eq!(row.choice.micro_batches, count, "{cut:?}");
            }
            let x = rows(BATCH, 64);
            let step = pipe.backward(&x, &x, |out: Tensor, x| Loss::mean(mean_square(&out, x)));
            assert_eq!(step.expect("a step").sizes.len(), count, "{cut:?} in {gpu} bytes");
        }
    }
}

#[test]
fn the_balance_is_the_one_that_was_judged() {
    if test_device() != Device::Cpu {
        return;
    }
    // One of the layers with weights fits, two do not.
    let within = || Arena::limited("device", 480_000).expect("a limit");
    let on_two =
        |builder: Builder| builder.devices([0, 1].map(|_| DeviceSpec::from(within()).threads(1)));
    let mut pipe = build(on_two(auto(uneven(), 128, LARGE)));
    assert_eq!((pipe.balance().sizes(), offloaded(&pipe)), (&[1, 3][..], 0));
    let mut optimizer = pipe.optimizer(Adam::new(0.1)).expect("an optimizer");
    let x = rows(BATCH, 128);
    for _ in 0..2 {
        let step = pipe.backward(&x, &x, |out: Tensor, x| Loss::mean(mean_square(&out, x)));
        step.expect("a step in the memory that was judged");
        optimizer.update();
    }
    for (given, fits) in [([1, 3], true), ([2, 2], false)] {
        let pipe = build(on_two(auto(uneven(), 128, LARGE).balance(given)));
        assert_eq!(pipe.balance().sizes(), given);
        assert_eq!(offloaded(&pipe) == 0, fits, "{given:?}");
    }
    let by_time = BalanceBy::by_time(&rows(SAMPLE, 128)).optimizer(Adam::new(0.1));
    let pipe = build(on_two(auto(uneven(), 128, LARGE).balance(by_time)));
    assert_eq!((pipe.balance().sizes(), offloaded(&pipe)), (&[1, 3][..], 0));
}

#[test]
fn a_given_schedule_stays_and_all_of_it_is_offloaded_or_nothing() {
    let three = Schedule::BreadthFirst { stages_per_device: 3 };
    let split = Schedule::InterleavedZeroBubble { stages_per_device: 3 };
    for (schedule, gpu, stages) in
        [(three, SMALL, 3), (three, LARGE, 0), (split, SMALL, 0), (split, LARGE, 0)]
    {
        let pipe = build(auto(deep(), 64, gpu).schedule(schedule));
        assert_eq!((pipe.schedule(), offloaded(&pipe)), (schedule, stages), "{gpu} bytes");
        let pipe = build(auto(deep(), 64, gpu).schedule(schedule).balance([2, 4, 6]));
        assert_eq!((pipe.schedule(), offloaded(&pipe)), (schedule, stages), "{gpu} bytes");
        assert_eq!(pipe.balance().sizes(), [2, 4, 6]);
    }
}

#[test]
fn settings_that_cannot_be_built_are_refused_before_layers_are_measured() {
    let builder = || auto(deep(), 64, SMALL);
    let refused = |builder: Builder, words: &str| {
        assert_fails(builder.plan_offload(0, |_| panic!("measured")), &[words]);
        assert_fails(builder.build(), &[words]);
    };
    refused(builder().devices(Vec::<DeviceSpec>::new()), "stage");
    refused(auto(Layers::new(), 64, SMALL), "no layer");
    refused(builder().micro_batches(MicroBatches::Count(0)), "0");
    refused(builder().replicas(2), "1 devices cannot be divided");
    refused(builder().offload_gradients(Kind::BFloat16), "need a model in bf16");
    refused(builder().balance([6, 6]), "2 stages, 1 on a device, need 2 devices");
}

#[test]
fn a_limited_host_arena_is_the_hosts_memory() {
    if test_device() != Device::Cpu {
        return;
    }
    let most = |limit: u64, taken: i64, given: Option<Bytes>| {
        let host = Arena::limited("host", limit).expect("a limit");
        let _taken = {
            let _entered = host.enter();
            Tensor::zeros([taken], (Kind::Uint8, Device::Cpu))
        };
        let offload = Offload::Auto { gpu: Some(Bytes(SMALL)), host: given };
        let builder = auto(deep(), 64, SMALL).offload(offload).host(host);
        match builder.plan_offload(0, |_| {}).expect("a plan") {
            OffloadPlan::Planned { row, .. } => Some(row.host_bytes),
            _ => None,
        }
    };
    let needed = most(LARGE, 0, None).expect("a plan in much memory");
    assert!(needed > 200_000, "{needed}");
    assert!(most(2 * needed, 0, None).is_some_and(|bytes| bytes <= 2 * needed));
    for (limit, taken, given) in [
        (100_000, 0, None),
        (10_000_000, 9_900_000, None),
        (100_000, 0, Some(Bytes(LARGE))),
        (LARGE, 0, Some(Bytes(100_000))),
    ] {
        let planned = most(limit, taken, given);
        assert_eq!(planned, None, "{limit} bytes, {taken} taken, {given:?} given");
    }
}

#[test]
fn a_model_with_exact_norms_is_offloaded_whole_or_not_at_all() {
    let exact = BatchNormConfig { policy: BatchNormPolicy::Exact, ..BatchNormConfig::default() };
    let layers = || {
        let layers = deep().add_norm("norm", move |p| batch_norm1d(p, 64, exact));
        layers.add("last", linear(64))
    };
    for (gpu, expected) in [(SMALL, 14), (LARGE, 0)] {
        let mut pipe = build(auto(layers(), 64, gpu));
        assert_eq!(offloaded(&pipe), expected, "{gpu} bytes");
        let x = rows(BATCH, 64);
        let step = pipe.backward(&x, &x, |out: Tensor, x| Loss::mean(mean_square(&out, x)));
        step.expect("a step");
    }
}
