//! Times one optimizer step against tch's, on tensors of ResNet-50's sizes.
//!
//! `cargo bench -p brimful --bench optimizer -- cpu` (or `cuda:0`)
#![allow(clippy::print_stdout)] // Printing is what this program is for.

mod timing;

use std::time::Instant;

use brimful::optim::{Adam, AdamW, Method, Optimizer, Sgd};
use brimful::{Result, device};
use brimful_torch::device as torch_device;
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const ROUNDS: usize = 21;

fn main() -> Result<()> {
    let name = timing::argument().unwrap_or_else(|| "cpu".into());
    let device = device::find(&name)?;
    let shapes = resnet50();
    let count: i64 = shapes.iter().map(|shape| shape.iter().product::<i64>()).sum();
    println!(
        "{} tensors, {:.1} M parameters, f32, {name}, {} threads",
        shapes.len(),
        count as f64 / 1e6,
        tch::get_num_threads()
    );
    println!("{:<22}{:>12}{:>12}{:>8}", "a step of", "brimful, ms", "tch, ms", "ratio");
    let (sgd, momentum) = (Sgd::new(0.1), Sgd::new(0.1).momentum(0.9).weight_decay(1e-4));
    compare("sgd", device, sgd.into(), nn::Sgd::default())?;
    compare("sgd, momentum, decay", device, momentum.into(), nn::sgd(0.9, 0.0, 1e-4, false))?;
    compare("adam", device, Adam::new(1e-3).into(), nn::Adam::default())?;
    compare("adamw", device, AdamW::new(1e-3).into(), nn::AdamW::default())?;
    let amsgrad = AdamW::new(1e-3).amsgrad(true);
    compare("adamw, amsgrad", device, amsgrad.into(), nn::AdamW::default().amsgrad(true))
}

/// Takes turns, in both orders, so that whatever else the machine does meets both; prints medians.
fn compare(name: &str, device: Device, ours: Method, theirs: impl OptimizerConfig) -> Result<()> {
    let (a, b) = (store(device)?, store(device)?);
    let mut ours = Optimizer::new(&a, ours)?;
    let mut theirs = theirs.build(&b, 1e-3)?;
    let mut their_step = || {
        theirs.step();
        Ok(())
    };
    let mut our_step = || ours.step();
    let mut steps: [&mut dyn FnMut() -> Result<()>; 2] = [&mut our_step, &mut their_step];
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for who in [round % 2, (round + 1) % 2] {
            times[who].push(milliseconds(device, &mut steps[who])?);
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let [ours, theirs] = times.map(|times| timing::median(&times));
    println!("{name:<22}{ours:>12.2}{theirs:>12.2}{:>8.2}", theirs / ours);
    Ok(())
}

fn milliseconds(device: Device, f: impl FnOnce() -> Result<()>) -> Result<f64> {
    torch_device::synchronize(device)?;
    let start = Instant::now();
    f()?;
    torch_device::synchronize(device)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// Variables of these shapes, with gradients.
fn store(device: Device) -> Result<nn::VarStore> {
    let vs = nn::VarStore::new(device);
    for (i, shape) in resnet50().iter().enumerate() {
        let mut variable = vs.root().ones(&format!("p{i}"), shape);
        let gradient = Tensor::f_randn(shape.as_slice(), (Kind::Float, device))?;
        brimful_torch::autograd::set_gradient(&mut variable, Some(&gradient))?;
    }
    Ok(vs)
}

/// The shapes of the network's parameters: convolutions, each with its BatchNorm, and the head.
fn resnet50() -> Vec<Vec<i64>> {
    let mut shapes = Vec::new();
    let mut convolution = |outputs: i64, inputs: i64, size: i64| {
        shapes.extend([vec![outputs, inputs, size, size], vec![outputs], vec![outputs]]);
    };
    convolution(64, 3, 7);
    let mut inputs = 64;
    for (width, blocks) in [(64, 3), (128, 4), (256, 6), (512, 3)] {
        for block in 0..blocks {
            convolution(width, inputs, 1);
            convolution(width, width, 3);
            convolution(4 * width, width, 1);
            if block == 0 {
                convolution(4 * width, inputs, 1);
            }
            inputs = 4 * width;
        }
    }
    shapes.extend([vec![1000, 2048], vec![1000]]);
    shapes
}
