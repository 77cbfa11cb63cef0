//! A model that does not fit its device trains all the same, with stages that live on the host.
//!
//! `cargo run -p brimful --example at_home`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::memory::Arena;
use brimful::optim::AdamW;
use brimful::pipeline::{Homes, PipelineOptimizer};
use brimful::schedule::Schedule;
use brimful::{Bytes, DeviceSpec, Layers, Loss, Pipeline, Result, Step};
use tch::{Device, Kind, Tensor, nn};

const BLOCKS: usize = 12;
const WIDTH: i64 = 256;
/// Of the device: a quarter of what weights, gradients and AdamW's moments take.
const LIMIT: u64 = 3 << 20;
const STEPS: usize = 5;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    tch::manual_seed(0);
    let parameters = layers().parameter_count()?;
    println!("{parameters} parameters take {} in training", Bytes(parameters * 16));
    let x = Tensor::randn([64, WIDTH], (Kind::Float, Device::Cpu));
    let y = x.roll([1], [1]);

    let on_device = train(Homes::Device, Some(LIMIT), &x, &y);
    let refusal = on_device.expect_err("it does not fit");
    assert!(refusal.out_of_memory().is_some(), "{refusal}");
    println!("on a device of {}: {refusal}", Bytes(LIMIT));

    let at_home = train(Homes::Host, Some(LIMIT), &x, &y)?;
    let with_room = train(Homes::Device, None, &x, &y)?;
    for (home, room) in at_home.iter().zip(&with_room) {
        println!("loss {:.6} at home, {:.6} on a device with room", home.loss, room.loss);
        assert!((home.loss - room.loss).abs() < 1e-5 * room.loss);
    }
    let peak = at_home.iter().flat_map(|step| step.peaks.iter().flatten()).max();
    println!("the device held {} at most", peak.expect("its account counts"));
    Ok(())
}

fn layers() -> Layers {
    (0..BLOCKS).fold(Layers::new(), |layers, n| {
        layers
            .add(format!("linear{n}"), |p| nn::linear(p, WIDTH, WIDTH, Default::default()))
            .add_fn(format!("tanh{n}"), |x| x.tanh())
    })
}

/// A few steps, with a stage for each linear layer.
fn train(homes: Homes, limit: Option<u64>, x: &Tensor, y: &Tensor) -> Result<Vec<Step>> {
    tch::manual_seed(1);
    let device = Arena::new("device");
    device.set_limit(limit)?;
    let mut pipe = Pipeline::builder(layers())
        .devices([DeviceSpec::cpu().arena(device)]) // or Device::Cuda(0)
        .schedule(Schedule::BreadthFirst { stages_per_device: BLOCKS })
        .balance([2; BLOCKS])
        .homes(homes)
        .micro_batches(8)
        .build()?;
    let mut optimizer = pipe.optimizer(AdamW::new(1e-3))?;
    (0..STEPS).map(|_| step(&mut pipe, &mut optimizer, x, y)).collect()
}

fn step(
    pipe: &mut Pipeline,
    optimizer: &mut PipelineOptimizer,
    x: &Tensor,
    y: &Tensor,
) -> Result<Step> {
    let step =
        pipe.backward(x, y, |out: Tensor, y| Loss::mean(out.mse_loss(y, tch::Reduction::Mean)))?;
    optimizer.step()?; // at home it returns at once: the update runs behind the next step
    optimizer.zero_grad()?;
    Ok(step)
}
