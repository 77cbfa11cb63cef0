//! `brimful bench convergence`: the same training in one piece, in micro-batches and in stages.
//!
//! BatchNorm normalises each micro-batch by its own statistics, so the three are not equal step by
//! step. What they come to should differ by no more than chance: each is trained with several seeds,
//! and the difference of the mean accuracies is put beside twice its own standard error.

use std::ops::ControlFlow;

use anyhow::{Context, Result, bail};
use brimful::Bytes;
use clap::{Args, Parser};
use serde::Serialize;
use serde_json::json;

use super::journal::Journal;
use super::progress::Progress;
use crate::args::{self, Command};
use crate::commands::train::{self, Epoch, Trainer};
use crate::setting::{self, MODELS, ModelName, words};

/// Who trains, and what `brimful train` is told then.
const CONTESTANTS: [(&str, &str); 3] = [
    ("full batch", "--micro-batches 1"),
    ("micro-batches", "--micro-batches 16"),
    ("4 stages", "--micro-batches 16 --stages 4"),
];

/// Options of `brimful bench convergence`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful bench convergence --data digits --batch-size 256 --epochs 4      in minutes on a CPU
  apt-get install dataset-fashion-mnist
  brimful bench convergence --data /usr/share/datasets/fashion-mnist --device cuda")]
pub struct Options {
    #[arg(long, value_name = "NAME|PATH", help = words::DATA)]
    data: String,
    #[arg(long, default_value = "resnet18", value_name = "NAME", help = MODELS)]
    model: ModelName,
    #[arg(long, value_name = "N", alias = "batch", default_value_t = 1024)]
    #[arg(value_parser = words::count, help = words::BATCH_SIZE)]
    batch_size: usize,
    #[arg(long, value_name = "N", default_value_t = 10, help = words::EPOCHS)]
    #[arg(value_parser = words::count)]
    epochs: usize,
    /// Runs of each contestant, each with first parameters and an order of its own
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u64).range(2..))]
    seeds: u64,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    #[arg(long, help = words::JSON_LINES)]
    json: bool,
}

/// Trains with one seed after the other, then compares.
pub fn run(options: &Options) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    let facts = json!({
        "optimizer": "adamw",
        "batch_norm": "deferred",
        "data": options.data,
        "epochs": options.epochs,
    });
    let mut journal = Journal::begin(device, options.json, facts)?;
    let progress = Progress::new();
    let mut accuracies = CONTESTANTS.map(|_| Vec::new());
    for seed in 0..options.seeds {
        for ((name, arguments), reached) in CONTESTANTS.iter().zip(&mut accuracies) {
            let epoch = options.train(seed, name, arguments, &progress)?;
            reached.push(epoch.test_accuracy);
            Run::new(options, name, seed, &epoch).enter(&mut journal)?;
        }
    }
    for ((name, _), reached) in CONTESTANTS.iter().zip(&accuracies) {
        Comparison::new(options, name, reached, &accuracies[0]).enter(&mut journal)?;
    }
    journal.end()
}

impl Options {
    /// The last epoch of a training.
    fn train(&self, seed: u64, name: &str, arguments: &str, progress: &Progress) -> Result<Epoch> {
        let title = format!("{name}, seed {seed}");
        progress.row(&title);
        let mut trainer = Trainer::new(&self.training(seed, arguments)?)?;
        let mut last = None;
        for number in 0..self.epochs {
            progress.turn(&title, "epoch", number, 0, self.epochs);
            last = trainer.run_epoch(|_| ControlFlow::Continue(()))?;
        }
        progress.done();
        last.context("--epochs 0: give it at least 1")
    }

    fn training(&self, seed: u64, arguments: &str) -> Result<train::Options> {
        let Self { model, batch_size, epochs, .. } = self;
        let line = format!(
            "brimful train --model {model} --batch-size {batch_size} --epochs {epochs} --seed {seed} \
             {arguments}"
        );
        let words = line.split_whitespace().chain(["--data", &self.data]);
        let device = self.device.as_deref().map(|device| ["--device", device]);
        let words = words.chain(device.into_iter().flatten());
        match args::Args::try_parse_from(words)?.command {
            Command::Train(options) => Ok(options),
            _ => bail!("the command of a training is not one"),
        }
    }
}

/// One contestant's training with one seed.
#[derive(Debug, Serialize)]
struct Run {
    contestant: &'static str,
    model: ModelName,
    batch: usize,
    micro_batch: usize,
    seed: u64,
    epochs: usize,
    loss: f64,
    test_loss: f64,
    test_accuracy: f64,
    samples_per_s: f64,
    peak_bytes: Bytes,
}

impl Run {
    fn new(options: &Options, contestant: &'static str, seed: u64, epoch: &Epoch) -> Self {
        Self {
            contestant,
            model: options.model,
            batch: options.batch_size,
            micro_batch: epoch.micro_batch_size,
            seed,
            epochs: epoch.epoch,
            loss: epoch.loss,
            test_loss: epoch.test_loss,
            test_accuracy: epoch.test_accuracy,
            samples_per_s: epoch.samples_per_s,
            peak_bytes: epoch.peak_bytes,
        }
    }

    fn enter(&self, journal: &mut Journal) -> Result<()> {
        let Self { contestant, model, batch, seed, epochs, loss, test_loss, .. } = self;
        let title = format!("{model}, mini-batch {batch}, after {epochs} epochs");
        let columns = format!(
            "  {:<16}{:>5}{:>10}{:>12}{:>12}{:>11}{:>12}",
            "", "seed", "loss", "test loss", "accuracy", "samples/s", "peak"
        );
        let text = format!(
            "  {contestant:<16}{seed:>5}{loss:>10.4}{test_loss:>12.4}{:>10.2} %{:>11.1}{:>12}",
            100.0 * self.test_accuracy,
            self.samples_per_s,
            self.peak_bytes
        );
        journal.write(&title, &columns, &text, self)
    }
}

/// All of a contestant's trainings beside those of the full batch.
#[derive(Debug, Serialize)]
struct Comparison {
    contestant: &'static str,
    model: ModelName,
    seeds: usize,
    mean_accuracy: f64,
    deviation: f64,
    /// The mean's from that of the full batch.
    difference: f64,
    /// Twice the standard error of that difference.
    noise: f64,
    within_noise: bool,
}

impl Comparison {
    fn new(options: &Options, contestant: &'static str, reached: &[f64], full: &[f64]) -> Self {
        let ((mean, deviation), (full_mean, full_deviation)) = (spread(reached), spread(full));
        let difference = mean - full_mean;
        let variance = (deviation.powi(2) + full_deviation.powi(2)) / reached.len() as f64;
        let noise = 2.0 * variance.sqrt();
        Self {
            contestant,
            model: options.model,
            seeds: reached.len(),
            mean_accuracy: mean,
            deviation,
            difference,
            noise,
            within_noise: difference.abs() <= noise,
        }
    }

    fn enter(&self, journal: &mut Journal) -> Result<()> {
        let title = format!("Accuracy over {} seeds", self.seeds);
        let columns = format!(
            "  {:<16}{:>10}{:>12}{:>13}{:>10}   {}",
            "", "mean", "deviation", "difference", "noise", "within it"
        );
        let percent = |share: f64| format!("{:.2} %", 100.0 * share);
        let text = format!(
            "  {:<16}{:>10}{:>12}{:>13}{:>10}   {}",
            self.contestant,
            percent(self.mean_accuracy),
            percent(self.deviation),
            percent(self.difference),
            percent(self.noise),
            if self.within_noise { "yes" } else { "no" }
        );
        journal.write(&title, &columns, &text, self)
    }
}

/// The mean of some numbers, and their standard deviation as a sample.
fn spread(numbers: &[f64]) -> (f64, f64) {
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0)).sqrt())
}
