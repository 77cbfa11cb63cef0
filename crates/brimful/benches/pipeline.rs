//! What the executor itself costs: a step of stages that do next to nothing, an action at a time.
//!
//! Each stage adds a number to one value, so that there is a gradient to pass on. What libtorch and
//! the loss take is in the plain micro-batched step of one such layer. The difference to that,
//! divided by the number of actions of a device (2 m), is the executor's. And a backward in halves beside the
//! whole one.

use std::hint::black_box;
use std::time::{Duration, Instant};

use brimful::schedule::Schedule;
use brimful::{DeviceSpec, Layers, Loss, MicroBatcher, Pipeline, Size};
use brimful_torch::autograd::backward;
use brimful_torch::split_backward::SplitBackward;
use brimful_torch::threads::limit_threads;
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

/// Blocks of a GPT and of a ResNet, as one stage.
fn gpt_blocks(x: &Tensor, p: &nn::Path) -> Box<dyn Fn(&Tensor) -> Tensor> {
    let width = x.size()[2];
    let block = |p: nn::Path| {
        let norms =
            ["n1", "n2"].map(|name| nn::layer_norm(&p / name, vec![width], Default::default()));
        let linear =
            |name, from, to| nn::linear(&p / name, from * width, to * width, Default::default());
        let [qkv, out] = [linear("qkv", 1, 3), linear("out", 1, 1)];
        let [up, down] = [linear("up", 1, 4), linear("down", 4, 1)];
        move |x: &Tensor| {
            let (batch, tokens, width) = x.size3().expect("three dimensions");
            let parts = x.apply(&norms[0]).apply(&qkv).view([batch, tokens, 3, 8, width / 8]);
            let parts = parts.permute([2, 0, 3, 1, 4]).unbind(0);
            let mixed = Tensor::scaled_dot_product_attention(
                &parts[0],
                &parts[1],
                &parts[2],
                None::<Tensor>,
                0.0,
                true,
                None,
                false,
            );
            let x = x + mixed.transpose(1, 2).reshape([batch, tokens, width]).apply(&out);
            &x + x.apply(&norms[1]).apply(&up).gelu("none").apply(&down)
        }
    };
    let blocks: Vec<_> = (0..4).map(|number| block(p / number)).collect();
    Box::new(move |x| blocks.iter().fold(x.shallow_clone(), |x, block| block(&x)))
}

fn resnet_blocks(x: &Tensor, p: &nn::Path) -> Box<dyn Fn(&Tensor) -> Tensor> {
    let channels = x.size()[1];
    let block = |p: nn::Path| {
        let inner = channels / 4;
        let layers = [(channels, inner, 1), (inner, inner, 3), (inner, channels, 1)];
        let layers = layers.map(|(from, to, size)| {
            let config = nn::ConvConfig { padding: size / 2, bias: false, ..Default::default() };
            let conv = nn::conv2d(&p / format!("conv{from}-{to}"), from, to, size, config);
            (conv, nn::batch_norm2d(&p / format!("bn{from}-{to}"), to, Default::default()))
        });
        move |x: &Tensor| {
            let run = |x: Tensor, (conv, norm): &(nn::Conv2D, nn::BatchNorm)| {
                x.apply(conv).apply_t(norm, true).relu()
            };
            (x + layers.iter().fold(x.shallow_clone(), run)).relu()
        }
    };
    let blocks: Vec<_> = (0..4).map(|number| block(p / number)).collect();
    Box::new(move |x| blocks.iter().fold(x.shallow_clone(), |x, block| block(&x)))
}

/// A stage's backward, whole and in halves. They take turns, whichever of them is timed: two rows one after
/// the other would differ by what else the machine does meanwhile.
fn halves(c: &mut Criterion) {
    let _threads = limit_threads(1);
    // As the program does: between halves more is held, so that with glibc's defaults three times as many
    // pages go back to the system and are faulted in again.
    brimful::memory::keep_freed_blocks();
    let mut group = c.benchmark_group("backward");
    let options = (Kind::Float, Device::Cpu);
    type Blocks = fn(&Tensor, &nn::Path) -> Box<dyn Fn(&Tensor) -> Tensor>;
    let stages: [(&str, [i64; 4], Blocks); 2] =
        [("gpt", [1, 4, 64, 256], gpt_blocks), ("resnet", [8, 256, 14, 14], resnet_blocks)];
    for (name, shape, blocks) in stages {
        let x = Tensor::randn(shape, options);
        let x = if name == "gpt" { x.squeeze_dim(0) } else { x };
        let store = nn::VarStore::new(Device::Cpu);
        let stage = blocks(&x, &store.root());
        let forward = || {
            let x = x.detach().set_requires_grad(true);
            let out = stage(&x);
            let gradient = out.ones_like();
            (x, out, gradient)
        };
        let whole = || {
            let (_x, out, gradient) = forward();
            let start = Instant::now();
            backward(&[&out], &[Some(&gradient)], false).expect("a backward");
            start.elapsed()
        };
        let split = || {
            let (x, out, gradient) = forward();
            let start = Instant::now();
            let groups = [vec![(out, gradient)]];
            let (_, mut weights) = SplitBackward::input_half(&groups, &[x]).expect("a half");
            drop(groups);
            weights.weight_half(0).expect("a half");
            start.elapsed()
        };
        let turns = |times, timed: fn((Duration, Duration)) -> Duration| -> Duration {
            (0..times).map(|_| timed((whole(), split()))).sum()
        };
        group.bench_function(BenchmarkId::new("whole", name), |b| {
            b.iter_custom(|times| turns(times, |(whole, _)| whole));
        });
        group.bench_function(BenchmarkId::new("halves", name), |b| {
            b.iter_custom(|times| turns(times, |(_, halves)| halves));
        });
    }
    group.finish();
}

criterion_group! {
    name = pipeline;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(3));
    targets = executing, halves
}
criterion_main!(pipeline);
