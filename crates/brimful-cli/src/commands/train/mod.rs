//! `brimful train`: trains a model on data, in micro-batches, inside a memory limit.

mod progress;
mod saved;
mod trainer;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use brimful::Bytes;
use brimful::device;
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::setting::{ModelName, NumberType};
use progress::Progress;
pub(crate) use trainer::{Epoch, Trainer};

/// Options of `brimful train`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  brimful train                                       the shipped digits, an mlp
  brimful train --model resnet18 --batch-size all --micro-batch 64 --memory-limit 256MiB
                                                      the whole training set as one mini-batch
  brimful train --model gpt --data book.txt --device cuda --dtype bf16
  brimful train --data ~/fashion-mnist --save model.safetensors
  brimful train --data ~/fashion-mnist --save model.safetensors --resume model.safetensors")]
pub(crate) struct Options {
    /// The model
    #[arg(long, value_enum, default_value = "mlp")]
    pub(crate) model: ModelName,
    /// digits (shipped), synthetic (made up), a folder of MNIST-format IDX files, or a text file
    #[arg(long, default_value = "digits", value_name = "NAME|PATH")]
    pub(crate) data: String,
    /// What updates the parameters
    #[arg(long, value_enum, default_value = "adamw")]
    pub(crate) optimizer: OptimizerName,
    /// How far a step goes [default: 0.05 for sgd, 0.001 for the others]
    #[arg(long)]
    pub(crate) learning_rate: Option<f64>,
    /// Samples a step: a number, or all of the training set
    #[arg(long, default_value = "128", value_name = "N|all")]
    pub(crate) batch_size: BatchSize,
    /// Samples in one forward and backward; the gradient does not depend on it
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub(crate) micro_batch: usize,
    /// Let the model, its gradients and its activations have at most so much memory (CPU alone)
    #[arg(long, value_name = "BYTES")]
    pub(crate) memory_limit: Option<Bytes>,
    /// cpu, cuda or cuda:1 [default: cuda where there is one]
    #[arg(long)]
    pub(crate) device: Option<String>,
    /// The type of the model's numbers
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) dtype: NumberType,
    /// Passes over the training set
    #[arg(long, default_value_t = 10)]
    pub(crate) epochs: usize,
    /// Of the first parameters, the order of the samples, and dropout
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Write model, optimizer and progress to this safetensors file after every epoch
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
    /// Go on from such a file, to the same parameters as without the interruption
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Print one JSON object an epoch instead of text, the last with "done": true
    #[arg(long)]
    pub(crate) json: bool,
}

/// What updates the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerName {
    /// Stochastic gradient descent with momentum 0.9
    Sgd,
    Adam,
    Adamw,
}

/// How many samples a step has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BatchSize {
    All,
    Samples(usize),
}

impl std::str::FromStr for BatchSize {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.parse() {
            _ if text == "all" => Ok(Self::All),
            Ok(0) | Err(_) => Err("give a number from 1 on, or all".into()),
            Ok(samples) => Ok(Self::Samples(samples)),
        }
    }
}

/// Trains, and reports each epoch.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    check(options)?;
    let mut trainer = Trainer::new(options)?;
    if let Some(path) = &options.resume {
        saved::load(path, &mut trainer, options)
            .with_context(|| format!("cannot go on from {}", path.display()))?;
    }
    let progress = Progress::new(options, &trainer)?;
    while trainer.epoch() < options.epochs {
        let epoch = trainer.run_epoch(|loss| progress.step(loss))?;
        if let Some(path) = &options.save {
            saved::store(path, &trainer, options)?;
        }
        progress.finished(&epoch, trainer.epoch() == options.epochs)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn check(options: &Options) -> Result<()> {
    ensure!(options.micro_batch > 0, "--micro-batch 0: give it at least 1 sample");
    if let Some(rate) = options.learning_rate {
        ensure!(
            rate.is_finite() && rate >= 0.0,
            "--learning-rate {rate}: give it a number from 0 on"
        );
    }
    let wanted = options.device.as_deref().unwrap_or("cpu");
    if options.memory_limit.is_some() && device::find(wanted)? != tch::Device::Cpu {
        bail!("--memory-limit is for the CPU: leave it out, or say --device cpu");
    }
    Ok(())
}
