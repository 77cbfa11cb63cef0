//! What the executor itself costs: a step of stages that do next to nothing, an action at a time.
//!
//! Each stage adds a number to one value, so that there is a gradient to pass on. What libtorch and
//! the loss take is in the plain micro-batched step of one such layer. The difference to that,
//! divided by the number of actions of a device (2 m), is the executor's.

use std::hint::black_box;
use std::time::Duration;

use brimful::schedule::Schedule;
use brimful::{DeviceSpec, Layers, Loss, MicroBatcher, Pipeline, Size};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

const MICRO_BATCHES: usize = 64;

fn empty(stages: usize) -> Layers {
    (0..stages).fold(Layers::new(), |layers, j| {
        layers.add(j.to_string(), |p| {
            let number = p.zeros("number", &[1]);
            nn::func(move |x| x + &number)
        })
    })
}

fn executing(c: &mut Criterion) {
    let mut group = c.benchmark_group("executor");
    group.throughput(Throughput::Elements(2 * MICRO_BATCHES as u64));
    let x = Tensor::ones([MICRO_BATCHES as i64, 1], (Kind::Float, Device::Cpu));
    group.bench_function("plain", |b| {
        let store = nn::VarStore::new(Device::Cpu);
        let model = empty(1).build(&store.root()).expect("a model");
        let mut micro = MicroBatcher::new(&store, Size::Count(MICRO_BATCHES));
        b.iter(|| {
            let step =
                micro.backward(&x, |x| Loss::sum(model.forward_t(&x, true).sum(Kind::Float)));
            black_box(step.expect("a step"))
        });
    });
    for stages in [1, 2, 4] {
        let mut pipe = Pipeline::builder(empty(stages))
            .devices((0..stages).map(|_| DeviceSpec::cpu().threads(1)))
            .micro_batches(MICRO_BATCHES)
            .schedule(Schedule::OneFOneB)
            .build()
            .expect("a pipeline");
        group.bench_function(BenchmarkId::new("1f1b", stages), |b| {
            b.iter(|| {
                let step = pipe.backward(&x, &x, |out: Tensor, _| Loss::sum(out.sum(Kind::Float)));
                black_box(step.expect("a step"))
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = pipeline;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(3));
    targets = executing
}
criterion_main!(pipeline);
