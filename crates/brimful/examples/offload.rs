//! A model that does not fit its device trains all the same, with stages offloaded to the host.
//!
//! `cargo run -p brimful --example offload`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::memory::Arena;
use brimful::optim::{AdamW, Optimizer};
use brimful::pipeline::Offload;
use brimful::schedule::Schedule;
use brimful::{Bytes, DeviceSpec, Layers, Loss, MicroBatches, Pipeline, Result, StepReport};
use tch::{Device, Kind, Tensor, nn};

const BLOCKS: usize = 12;
const WIDTH: i64 = 256;
/// Memory of the device: a quarter of the bytes of weights, gradients and AdamW's moments.
const LIMIT: u64 = 3 << 20;
const STEPS: usize = 5;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    tch::manual_seed(0);
    let parameters = layers().parameter_count()?;
    println!("{parameters} parameters take {} in training", Bytes(parameters * 16));
    let x = Tensor::randn([64, WIDTH], (Kind::Float, Device::Cpu));
    let y = x.roll([1], [1]);

    let on_device = train(Offload::Device, Some(LIMIT), &x, &y);
    let refusal = on_device.expect_err("it does not fit");
    assert!(refusal.out_of_memory().is_some(), "{refusal}");
    println!("on a device of {}: {refusal}", Bytes(LIMIT));

    let on_host = train(Offload::Host, Some(LIMIT), &x, &y)?;
    let on_the_device = train(Offload::Device, None, &x, &y)?;
    for (on_host, on_the_device) in on_host.iter().zip(&on_the_device) {
        println!(
            "loss {:.6} on the host, {:.6} on a device with enough memory",
            on_host.loss, on_the_device.loss
        );
        assert!((on_host.loss - on_the_device.loss).abs() < 1e-5 * on_the_device.loss);
    }
    let peak = on_host.iter().flat_map(|step| step.peaks.iter().flatten()).max();
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
fn train(offload: Offload, limit: Option<u64>, x: &Tensor, y: &Tensor) -> Result<Vec<StepReport>> {
    tch::manual_seed(1);
    let device = Arena::new("device");
    device.set_limit(limit)?;
    let mut pipe = Pipeline::builder(layers())
        .devices([DeviceSpec::cpu().arena(device)]) // or Device::Cuda(0)
        .schedule(Schedule::BreadthFirst { stages_per_device: BLOCKS })
        .balance([2; BLOCKS])
        .offload(offload)
        .micro_batches(MicroBatches::Count(8))
        .build()?;
    let mut optimizer = pipe.optimizer(AdamW::new(1e-3))?;
    (0..STEPS).map(|_| step(&mut pipe, &mut optimizer, x, y)).collect()
}

fn step(
    pipe: &mut Pipeline,
    optimizer: &mut Optimizer,
    x: &Tensor,
    y: &Tensor,
) -> Result<StepReport> {
    let step =
        pipe.backward(x, y, |out: Tensor, y| Loss::mean(out.mse_loss(y, tch::Reduction::Mean)))?;
    optimizer.step()?; // returns at once: each stage is updated when it is fetched the next time
    optimizer.zero_grad()?;
    Ok(step)
}
