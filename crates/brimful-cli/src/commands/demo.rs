//! `brimful demo`: a step that runs out of memory, is caught, and a smaller one that fits.

use std::process::ExitCode;

use anyhow::{Result, bail};
use brimful::Bytes;
use brimful::memory::Arena;
use brimful::oom::{self, Caught};
use tch::nn::{self, Module};
use tch::{Device, Kind, TchError, Tensor};

use crate::output::line;

const LIMIT: u64 = 64 << 20;
const WIDTH: i64 = 512;
const SAMPLES: i64 = 16_384;

/// Trains one step with ever smaller batches, until one fits the arena.
pub fn run() -> Result<ExitCode> {
    let arena = Arena::limited("demo", LIMIT)?;
    let _inside = arena.enter();
    let store = nn::VarStore::new(Device::Cpu);
    let model = model(&store.root());
    line(&format!("A network of 4 layers on a device of {}.\n", Bytes(LIMIT)))?;
    let mut samples = SAMPLES;
    loop {
        arena.reset_peak();
        match oom::catch(|| step(&model, samples)) {
            Ok(loss) => {
                let peak = Bytes(arena.peak());
                line(&format!("{samples:>6} samples  fits: peak {peak}, loss {loss:.4}"))?;
                return Ok(ExitCode::SUCCESS);
            }
            Err(Caught::OutOfMemory(oom)) => line(&format!("{samples:>6} samples  {oom}"))?,
            Err(other) => bail!("the step failed for another reason: {other:?}"),
        }
        samples /= 2;
    }
}

fn model(root: &nn::Path) -> impl Module + use<> {
    (0..4).fold(nn::seq(), |layers, i| {
        layers.add(nn::linear(root / i, WIDTH, WIDTH, Default::default())).add_fn(Tensor::relu)
    })
}

fn step(model: &impl Module, samples: i64) -> Result<f64, TchError> {
    let x = Tensor::f_ones([samples, WIDTH], (Kind::Float, Device::Cpu))?;
    let loss = model.forward(&x).f_square()?.f_mean(Kind::Float)?;
    loss.f_backward()?;
    loss.f_double_value(&[])
}
