//! `brimful train`: trains a model on data, in micro-batches, inside a memory limit.

mod engine;
mod one_device;
mod pipelined;
mod progress;
mod records;
mod saved;
mod stages;
mod trainer;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use brimful::optim::{Adam, AdamW, Method, Sgd};
use brimful::report::Ended;
use brimful::{Bytes, Size, device};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::setting::{MODELS, ModelName, NumberType};
use progress::Progress;
use stages::Stages;
pub(crate) use trainer::{Epoch, Trainer};

/// Options of `brimful train`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  brimful train                                       the shipped digits, an mlp
  brimful train --model resnet18 --batch-size all --memory-limit 256MiB
                                                      the whole training set as one mini-batch
  brimful train --model gpt --data book.txt --device cuda --dtype bf16
  brimful train --model gpt --data synthetic --stages 4 --micro-batches 16 --stage-memory 64MiB
                                                      a model over four devices of 64 MiB each
  brimful train --model resnet18 --stages 4 --schedule interleaved-2 --recompute except-last \\
                --micro-batches 16 --report report.html   two stages on a device; what they did when
  brimful train --data ~/fashion-mnist --save model.safetensors
  brimful train --data ~/fashion-mnist --save model.safetensors --resume model.safetensors")]
pub(crate) struct Options {
    #[arg(long, default_value = "mlp", value_name = "NAME", help = MODELS)]
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
    /// Samples in one forward and backward: a number, auto (the fastest that fits) or largest (that
    /// fits). The gradient does not depend on it
    #[arg(long, default_value = "auto", value_name = "N|auto|largest")]
    pub(crate) micro_batch: MicroBatch,
    /// The same by number: cut each mini-batch into so many
    #[arg(long, value_name = "M", conflicts_with = "micro_batch")]
    pub(crate) micro_batches: Option<usize>,
    /// Let the model, its gradients and its activations have at most so much memory (CPU alone)
    #[arg(long, value_name = "BYTES")]
    pub(crate) memory_limit: Option<Bytes>,
    /// cpu, cuda or cuda:1 [default: cuda where there is one]
    #[arg(long)]
    pub(crate) device: Option<String>,
    /// Launch every micro-batch anew, instead of capturing it once and replaying it, which is for
    /// CUDA alone
    #[arg(long)]
    pub(crate) no_replay: bool,
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
    /// Go on from such a file; with a given --micro-batch, to the same parameters as without the
    /// interruption
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Write what happened to this file, for brimful report
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Write what happened as a page, which any browser opens
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Print one JSON object an epoch instead of text, the last with "done": true
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) stages: Stages,
}

impl Options {
    /// How a mini-batch is cut.
    fn size(&self) -> Size {
        self.micro_batches.map_or(self.micro_batch.0, Size::Count)
    }

    fn method(&self) -> Method {
        let rate = |default| self.learning_rate.unwrap_or(default);
        match self.optimizer {
            OptimizerName::Sgd => Sgd::new(rate(0.05)).momentum(0.9).into(),
            OptimizerName::Adam => Adam::new(rate(1e-3)).into(),
            OptimizerName::Adamw => AdamW::new(rate(1e-3)).into(),
        }
    }
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

/// How many samples a micro-batch has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MicroBatch(pub(crate) Size);

impl std::str::FromStr for MicroBatch {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self(Size::Auto)),
            _ if text == "largest" => Ok(Self(Size::Largest)),
            Ok(0) | Err(_) => Err("give a number from 1 on, auto or largest".into()),
            Ok(samples) => Ok(Self(Size::Fixed(samples))),
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
    let trained = train(&mut trainer, options);
    let ended = match &trained {
        Ok(()) => Ended::Finished,
        Err(error) => Ended::Failed(format!("{error:#}")),
    };
    let written = records::write(&trainer.recorder, ended, options);
    trained.and(written).map(|()| ExitCode::SUCCESS)
}

/// The epochs that are still to come.
fn train(trainer: &mut Trainer, options: &Options) -> Result<()> {
    let progress = Progress::new(options, trainer)?;
    while trainer.epoch() < options.epochs {
        let epoch = trainer.run_epoch(|loss| progress.step(loss))?;
        if let Some(path) = &options.save {
            saved::store(path, trainer, options)?;
        }
        progress.finished(&epoch, trainer.epoch() == options.epochs)?;
    }
    Ok(())
}

fn check(options: &Options) -> Result<()> {
    ensure!(options.micro_batches != Some(0), "--micro-batches 0: give it at least 1");
    options.stages.check(options)?;
    records::check(options)?;
    if let Some(rate) = options.learning_rate {
        ensure!(
            rate.is_finite() && rate >= 0.0,
            "--learning-rate {rate}: give it a number from 0 on"
        );
    }
    let wanted = options.device.as_deref().unwrap_or("cpu");
    let limits =
        [("memory-limit", options.memory_limit), ("stage-memory", options.stages.stage_memory)];
    for (name, limit) in limits {
        if limit.is_some() && device::find(wanted)? != tch::Device::Cpu {
            bail!("--{name} is for the CPU: leave it out, or say --device cpu");
        }
    }
    Ok(())
}
