//! The training loop: an epoch of steps, each one mini-batch, and a test.

use std::time::Instant;

use anyhow::Result;
use brimful::auto::Decision;
use brimful::report::{Record, Recorder};
use brimful::{Bytes, Error, Size, batch, split};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::engine::Engine;
use super::one_device::OneDevice;
use super::pipelined::Pipelined;
use super::{BatchSize, Options, records};
use crate::data::{Dataset, Examples};
use crate::setting::DROPOUT;

/// A model in training.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(super) engine: Box<dyn Engine>,
    dataset: Dataset,
    batch_size: usize,
    size: Size,
    seed: u64,
    /// The size that was found, where it is automatic.
    found: Option<usize>,
    pub(super) epoch: usize,
    pub(super) recorder: Recorder,
}

/// What an epoch came to.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Epoch {
    pub(crate) epoch: usize,
    /// The mean loss of its samples in training.
    pub(crate) loss: f64,
    pub(crate) test_loss: f64,
    pub(crate) test_accuracy: f64,
    pub(crate) micro_batch_size: usize,
    /// How often a step was run again with smaller micro-batches.
    pub(crate) retries: usize,
    /// What changed about an automatic size, and why.
    pub(crate) decisions: Vec<Decision>,
    pub(crate) peak_bytes: Bytes,
    pub(crate) samples_per_s: f64,
}

impl Trainer {
    /// A model with its first parameters, on one device or in stages.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        let dataset = options.model.data(&options.data, options.seed)?;
        let layers = options.model.layers(&dataset.sample, DROPOUT)?;
        let batch_size = match options.batch_size {
            BatchSize::All => dataset.train.len(),
            BatchSize::Samples(samples) => samples.min(dataset.train.len()),
        };
        tch::manual_seed(seed_of(options.seed, 0));
        let engine: Box<dyn Engine> = match options.stages.stages {
            None => Box::new(OneDevice::new(&layers, options)?),
            Some(_) => {
                let samples = micro_batch_size(options.size(), batch_size);
                let sample = batch::slice(&dataset.train.inputs, 0..samples)?;
                Box::new(Pipelined::new(layers, &options.stages, options, &sample)?)
            }
        };
        let (size, seed) = (options.size(), options.seed);
        let recorder = records::recorder(options, &*engine, &dataset)?;
        Ok(Self { engine, dataset, batch_size, size, seed, found: None, epoch: 0, recorder })
    }

    /// Epochs that are done.
    pub(crate) fn epoch(&self) -> usize {
        self.epoch
    }

    pub(crate) fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// How many steps an epoch has.
    pub(crate) fn steps(&self) -> usize {
        self.dataset.train.len().div_ceil(self.batch_size)
    }

    /// Trains on every sample once, and tests.
    ///
    /// All random numbers of an epoch come from its own seed, so that one that is run again, after
    /// an interruption, is the same.
    pub(crate) fn run_epoch(&mut self, progress: impl Fn(f64)) -> Result<Epoch> {
        tch::manual_seed(seed_of(self.seed, self.epoch + 1));
        let start = Instant::now();
        let (mut loss, mut peak, mut retries) = (0.0, Bytes(0), 0);
        let mut decisions: Vec<Decision> = Vec::new();
        let samples = self.dataset.train.len();
        let order = Tensor::randperm(samples as i64, (Kind::Int64, Device::Cpu));
        for range in split::by_size(samples, self.batch_size)? {
            let chosen = order.narrow(0, range.start as i64, range.len() as i64);
            let step = self.step(&chosen)?;
            loss += step.loss * range.len() as f64 / samples as f64;
            peak = peak.max(step.peak());
            retries += step.retries;
            for decision in &step.decisions {
                let same = |last: &Decision| (last.size, last.why) == (decision.size, decision.why);
                if !decisions.last().is_some_and(same) {
                    self.found = Some(decision.size);
                    decisions.push(decision.clone());
                }
            }
            progress(step.loss);
            self.recorder.step(step);
        }
        let seconds = start.elapsed().as_secs_f64();
        let (test_loss, test_accuracy) = self.test()?;
        self.recorder.test(test_loss, Some(test_accuracy));
        self.epoch += 1;
        Ok(Epoch {
            epoch: self.epoch,
            loss,
            test_loss,
            test_accuracy,
            micro_batch_size: (self.found)
                .unwrap_or_else(|| micro_batch_size(self.size, self.batch_size)),
            retries,
            decisions,
            peak_bytes: peak,
            samples_per_s: samples as f64 / seconds,
        })
    }

    /// One step on the chosen samples.
    fn step(&mut self, chosen: &Tensor) -> Result<Record> {
        let Examples { inputs, targets } = &self.dataset.train;
        let batch = (inputs.index_select(0, chosen), targets.index_select(0, chosen));
        self.engine.step(batch).map_err(|error| self.advise(error))
    }

    /// The loss and the share of right answers on the test samples.
    fn test(&mut self) -> Result<(f64, f64)> {
        let Examples { inputs, targets } = &self.dataset.test;
        let (loss, right) = self.engine.test((inputs.shallow_clone(), targets.shallow_clone()))?;
        Ok((loss, right.to_kind(Kind::Double).mean(Kind::Double).double_value(&[])))
    }

    fn advise(&self, error: Error) -> anyhow::Error {
        let advice = match self.size {
            Size::Fixed(size) if size > 1 => {
                Some(format!("try --micro-batch {}", size.div_ceil(2)))
            }
            Size::Count(count) if count < self.batch_size => {
                Some(format!("try --micro-batches {}", (2 * count).min(self.batch_size)))
            }
            _ => None,
        };
        match advice {
            Some(advice) if error.out_of_memory().is_some() => {
                anyhow::Error::from(error).context(advice)
            }
            _ => error.into(),
        }
    }
}

/// Samples in the largest micro-batch; of an automatic size a guess, to measure layers with.
fn micro_batch_size(size: Size, batch_size: usize) -> usize {
    match size {
        Size::Fixed(size) => size.min(batch_size),
        Size::Count(count) => batch_size.div_ceil(count),
        _ => batch_size.div_ceil(8),
    }
}

/// A seed for each epoch, and for what comes before them (0), that are not neighbours.
fn seed_of(seed: u64, epoch: usize) -> i64 {
    let mixed = (seed ^ (epoch as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)).rotate_left(17);
    i64::from_ne_bytes(mixed.to_ne_bytes())
}
