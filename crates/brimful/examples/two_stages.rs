//! A model in two stages, each a thread with an account of its own memory: the plain model's step.
//!
//! `cargo run -p brimful --example two_stages`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::memory::Arena;
use brimful::optim::Sgd;
use brimful::schedule::{Schedule, render};
use brimful::{DeviceSpec, Layers, Loss, MicroBatches, Pipeline};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tch::manual_seed(0);
    let layers = Layers::new()
        .add("first", |p| nn::linear(p, 32, 512, Default::default()))
        .add_fn("relu", |x| x.relu())
        .add("second", |p| nn::linear(p, 512, 512, Default::default()))
        .add_fn("tanh", |x| x.tanh())
        .add("third", |p| nn::linear(p, 512, 10, Default::default()));
    let x = Tensor::randn([64, 32], (Kind::Float, Device::Cpu));
    let y = Tensor::randint(10, [64], (Kind::Int64, Device::Cpu));

    let device = |name| DeviceSpec::cpu().threads(1).arena(Arena::new(name));
    let mut pipe = Pipeline::builder(layers.clone())
        .devices([device("stage 0"), device("stage 1")]) // on a GPU machine: Device::Cuda(0), …
        .balance([2, 3])
        .micro_batches(MicroBatches::Count(4))
        .schedule(Schedule::OneFOneB)
        .build()?;
    let mut optimizer = pipe.optimizer(Sgd::new(0.1))?;

    // The plain model, with the same values: saved models do not know how they were cut.
    let file = std::env::temp_dir().join(format!("stages-{}.safetensors", std::process::id()));
    pipe.save(&file)?;
    let mut store = nn::VarStore::new(Device::Cpu);
    let plain = layers.build(&store.root())?;
    store.load(&file)?;
    std::fs::remove_file(&file)?;
    plain.forward_t(&x, true).cross_entropy_for_logits(&y).backward();

    let step =
        pipe.backward(&x, &y, |out: Tensor, y| Loss::mean(out.cross_entropy_for_logits(y)))?;
    if let Some(timeline) = &step.timeline {
        println!("{}", render::grid(&timeline.actions));
    }
    let peaks: Vec<_> = step.peaks.iter().flatten().map(ToString::to_string).collect();
    println!(
        "loss {:.5}, {} micro-batches, peaks {}",
        step.loss,
        step.sizes.len(),
        peaks.join(", ")
    );

    let mut worst = 0.0;
    for (name, gradient) in pipe.gradients()? {
        let expected = store.variables()[&name].grad();
        let off = (gradient - &expected).abs().max() / expected.abs().max();
        worst = f64::max(worst, off.double_value(&[]));
    }
    optimizer.step()?;
    optimizer.zero_grad()?;
    assert!(worst < 1e-5, "a gradient is off by {worst:e}");
    println!("two stages left the plain model's gradients, to {worst:.0e}");
    Ok(())
}
