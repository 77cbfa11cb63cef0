//! `brimful-bench convergence`: the same training with the full batch, in micro-batches and in stages.
//!
//! A deferred BatchNorm normalises each micro-batch by its own statistics, so the steps are not equal. The
//! results should differ by no more than chance: each training runs with several seeds, and the difference of the
//! mean accuracies is reported beside twice its standard error. The staged run has a twin on one device with the
//! same micro-batches, which separates the effect of micro-batches from that of the pipeline. With micro-batches
//! of two samples, exact BatchNorms train where deferred ones cannot.

use anyhow::{Context, Result};
use brimful::Bytes;
use brimful::memory::Memory;
use brimful_cli::args::BrimfulArgs;
use brimful_cli::commands::train::{Decay, Epoch, TrainOptions, Trainer};
use brimful_cli::setting::{self, MODELS, ModelName, NormStatistics, words};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::json;

use crate::journal::{Journal, Output};
use crate::turns::TurnProgress;

/// Name of a training, and its flags for `brimful train`.
type Training = (&'static str, &'static str);

/// Trainings compared with the full batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Question {
    /// Micro-batches of an automatic size, 16 of them, and four stages
    Cuts,
    /// Micro-batches of two samples, with exact and with deferred BatchNorms
    Norms,
}

impl Question {
    /// Returns the trainings; the full batch comes first.
    fn trainings(self) -> &'static [Training] {
        match self {
            Self::Cuts => &[
                ("full batch", "--num-micro-batches 1"),
                // In memory that does not hold the mini-batch.
                ("micro-batches, auto", "--micro-batch-size auto --memory-limit LIMIT"),
                // The micro-batches of the stages, on one device.
                ("16 micro-batches", "--num-micro-batches 16"),
                ("4 stages", "--num-micro-batches 16 --stages 4"),
            ],
            Self::Norms => &[
                // Starts from the same initial parameters as the exact pairs: these depend on the list of layers,
                // which exact BatchNorms cut finer.
                ("full batch", "--num-micro-batches 1 --batch-norm exact"),
                ("pairs, exact", "--micro-batch-size 2 --batch-norm exact"),
                ("pairs, deferred", "--micro-batch-size 2 --batch-norm deferred"),
            ],
        }
    }
}

/// Options of `brimful-bench convergence`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench convergence --data digits --batch-size 256 --epochs 4 --memory-limit 208MiB
                                                      in minutes on a CPU
  brimful-bench convergence --data digits --batch-size 128 --epochs 3 --question norms
  apt-get install dataset-fashion-mnist
  brimful-bench convergence --data /usr/share/datasets/fashion-mnist --device cuda")]
pub(crate) struct ConvergenceOptions {
    #[arg(long, value_name = "NAME|PATH", help = words::DATA)]
    data: String,
    #[arg(long, default_value = "resnet18", value_name = "NAME", help = MODELS)]
    model: ModelName,
    #[arg(long, value_name = "N", default_value_t = 1024)]
    #[arg(value_parser = words::count, help = words::BATCH_SIZE)]
    batch_size: usize,
    /// Memory limit of each device, such as 96MiB or 16GB: for automatic micro-batches
    #[arg(long, default_value = "2GiB", value_name = "BYTES")]
    memory_limit: Bytes,
    #[arg(long, value_name = "N", default_value_t = 10, help = words::EPOCHS)]
    #[arg(value_parser = words::count)]
    epochs: usize,
    #[arg(long, value_enum, default_value = "cosine")]
    #[arg(help = words::LEARNING_RATE_DECAY, hide_possible_values = true)]
    learning_rate_decay: Decay,
    /// Question: variants to compare with the full batch
    #[arg(long, value_enum, default_value = "cuts")]
    question: Question,
    /// Random seeds: each contestant runs once per seed
    #[arg(long, value_delimiter = ',', default_value = "0,1,2", value_name = "SEED,…")]
    seeds: Vec<u64>,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    #[command(flatten)]
    output: Output,
}

/// Trains with one seed after the other, then compares.
pub(crate) fn run(options: &ConvergenceOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    options.check()?;
    let facts = json!({
        "optimizer": "adamw",
        "learning_rate_decay": options.learning_rate_decay.to_string(),
        "limit": options.memory_limit,
    });
    let mut journal = Journal::begin("convergence", device, &options.output, facts)?;
    let trainings = options.question.trainings();
    let progress = TurnProgress::new(options.seeds.len() * trainings.len() * options.epochs);
    let mut accuracies: Vec<Vec<f64>> = trainings.iter().map(|_| Vec::new()).collect();
    for &seed in &options.seeds {
        for (training, reached) in trainings.iter().zip(&mut accuracies) {
            let epoch = options.train(seed, *training, &progress)?;
            reached.push(epoch.test_accuracy);
            journal.enter(&options.row(training.0, seed, &epoch))?;
        }
    }
    for (&(contestant, _), reached) in trainings.iter().zip(&accuracies) {
        if let Some(comparison) = Comparison::new(reached, &accuracies[0]) {
            journal.enter(&SummaryRow { contestant, model: options.model, comparison })?;
        }
    }
    journal.end()
}

impl ConvergenceOptions {
    /// Checks before any training that the model supports the question.
    fn check(&self) -> Result<()> {
        if self.question == Question::Norms {
            let sample = self.model.synthetic_sample();
            self.model.layers_normed(&sample, 0.0, Some(NormStatistics::Exact))?;
        }
        Ok(())
    }

    /// Trains one contestant with one seed; returns the last epoch.
    fn train(&self, seed: u64, (name, told): Training, progress: &TurnProgress) -> Result<Epoch> {
        let title = format!("{name}, seed {seed}");
        progress.row(&title);
        let arguments = told.replace("LIMIT", &self.memory_limit.0.to_string());
        let mut trainer = Trainer::new(&self.training(seed, &arguments)?)?;
        let mut last = None;
        for number in 0..self.epochs {
            progress.turn(&title, "epoch", number, 0, self.epochs);
            last = Some(trainer.run_epoch()?);
            progress.advance(1);
        }
        progress.done();
        self.lift_limit()?;
        last.context("no epoch was trained")
    }

    /// Removes an accelerator's limit, which would otherwise outlast its contestant.
    fn lift_limit(&self) -> Result<()> {
        let memory = Memory::of(setting::device(self.device.as_deref())?)?;
        Ok(memory.set_limit(None)?)
    }

    fn training(&self, seed: u64, arguments: &str) -> Result<TrainOptions> {
        let Self { model, batch_size, epochs, learning_rate_decay: decay, .. } = self;
        let line = format!(
            "brimful train --model {model} --batch-size {batch_size} --epochs {epochs} --seed {seed} \
             --learning-rate-decay {decay} {arguments}"
        );
        let words = line.split_whitespace().chain(["--data", &self.data]);
        let device = self.device.as_deref().unwrap_or_else(|| setting::best_devices());
        let words = words.chain(["--device", device]);
        BrimfulArgs::training(words)
    }

    fn row(&self, contestant: &'static str, seed: u64, epoch: &Epoch) -> TrainingRow<'_> {
        let path = self.data.trim_end_matches('/');
        TrainingRow {
            contestant,
            model: self.model,
            data: path.rsplit('/').next().unwrap_or(path),
            batch: self.batch_size,
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
}

/// One contestant's training with one seed.
#[derive(Debug, Serialize)]
struct TrainingRow<'a> {
    contestant: &'static str,
    model: ModelName,
    data: &'a str,
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

/// All trainings of a contestant beside those of the full batch.
#[derive(Debug, Serialize)]
struct SummaryRow {
    contestant: &'static str,
    model: ModelName,
    #[serde(flatten)]
    comparison: Comparison,
}

/// Accuracies of a contestant beside those of the full batch.
#[derive(Debug, Serialize)]
struct Comparison {
    mean_accuracy: f64,
    deviation: f64,
    /// Mean accuracy minus that of the full batch.
    difference: f64,
    /// Twice the standard error of that difference.
    noise: f64,
    within_noise: bool,
}

impl Comparison {
    /// Compares the accuracies; returns none if a contestant has a single run, and so no deviation.
    fn new(reached: &[f64], full: &[f64]) -> Option<Self> {
        let ((mean, deviation), (full_mean, full_deviation)) = (spread(reached)?, spread(full)?);
        let share = |deviation: f64, runs: &[f64]| deviation.powi(2) / runs.len() as f64;
        let noise = 2.0 * (share(deviation, reached) + share(full_deviation, full)).sqrt();
        let difference = mean - full_mean;
        let within_noise = difference.abs() <= noise;
        Some(Self { mean_accuracy: mean, deviation, difference, noise, within_noise })
    }
}

/// Returns the mean of some numbers, and their sample standard deviation.
fn spread(numbers: &[f64]) -> Option<(f64, f64)> {
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
    (numbers.len() > 1).then(|| (mean, (squares / (count - 1.0)).sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_twice_the_standard_error_of_the_difference() {
        let comparison = Comparison::new(&[0.90, 0.92], &[0.91, 0.93]).expect("two runs each");
        assert!((comparison.difference + 0.01).abs() < 1e-12);
        // Both deviations are √2/100, over two runs each.
        assert!((comparison.noise - 2.0 * (2.0_f64 * 1e-4).sqrt()).abs() < 1e-12);
        assert!(comparison.within_noise);
        assert!(Comparison::new(&[0.9], &[0.9, 0.8]).is_none());
    }
}
