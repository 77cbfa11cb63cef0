//! Training that stops and goes on: on one device first, then as two stages, from the same files.
//!
//! `cargo run -p brimful --example resume`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::optim::{Optimizer, Sgd};
use brimful::{Layers, Loss, MicroBatcher, MicroBatches, Pipeline, save};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

const STEPS: u64 = 10;
const STOP: u64 = 4;

fn layers() -> Layers {
    Layers::new()
        .add("hidden", |p| nn::linear(p, 8, 64, Default::default()))
        .add_fn("tanh", |x| x.tanh())
        .add("output", |p| nn::linear(p, 64, 1, Default::default()))
}

/// The mini-batch of a step: the same whoever asks.
fn mini_batch(step: u64) -> (Tensor, Tensor) {
    tch::manual_seed(step as i64);
    let x = Tensor::randn([60, 8], (Kind::Float, Device::Cpu));
    let y = x.sum_dim_intlist(&[1_i64][..], true, Kind::Float).sin();
    (x, y)
}

fn loss(out: Tensor, y: &Tensor) -> Loss {
    Loss::mean(out.mse_loss(y, tch::Reduction::Mean))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::temp_dir().join(format!("resume-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let model_file = folder.join("model.safetensors");
    let state_file = folder.join("optimizer.safetensors");

    tch::manual_seed(0);
    let store = nn::VarStore::new(Device::Cpu);
    let model = layers().build(&store.root())?;
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(16));
    let mut optimizer = Optimizer::new(&store, Sgd::new(0.02).momentum(0.9))?;
    for step in 0..STEPS {
        if step == STOP {
            let variables: Vec<_> = store.variables().into_iter().collect();
            save::write(&model_file, &variables, &Default::default())?;
            optimizer.save(&state_file)?; // momentum, counters and learning rates
        }
        let done =
            micro.backward(&mini_batch(step), |(x, y)| loss(model.forward_t(&x, true), &y))?;
        println!("one device   step {step}  loss {:.6}", done.loss);
        optimizer.step()?;
        optimizer.zero_grad()?;
    }

    let mut pipe = Pipeline::builder(layers())
        .devices([Device::Cpu, Device::Cpu])
        .balance([2, 1])
        .micro_batches(MicroBatches::Samples(16))
        .build()?;
    let mut optimizer = pipe.optimizer(Sgd::new(0.02).momentum(0.9))?;
    pipe.load(&model_file)?;
    optimizer.load(&state_file)?;
    for step in STOP..STEPS {
        let (x, y) = mini_batch(step);
        let done = pipe.backward(&x, &y, loss)?;
        println!("two stages   step {step}  loss {:.6}", done.loss);
        optimizer.step()?;
        optimizer.zero_grad()?;
    }

    std::fs::remove_dir_all(&folder)?;
    let off = |(name, value): &(String, Tensor)| (&store.variables()[name] - value).abs().max();
    let worst = pipe.variables()?.iter().map(|v| off(v).double_value(&[])).fold(0.0, f64::max);
    assert!(worst < 1e-5, "the parameters differ by {worst:e}");
    println!("stopped before step {STOP}, resumed as two stages: parameters differ by {worst:e}");
    Ok(())
}
