//! The training loop: an epoch of steps, each one mini-batch in micro-batches, and a test.

use std::time::Instant;

use anyhow::{Context, Result};
use brimful::layers::Model;
use brimful::memory::{Arena, Memory};
use brimful::optim::{Adam, AdamW, Optimizer, Sgd};
use brimful::{Bytes, Error, Loss, MicroBatcher, Size, batch, device, split};
use serde::Serialize;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::{BatchSize, OptimizerName, Options};
use crate::data::{Dataset, Examples};
use crate::setting::{cross_entropy, typed};

/// A model in training.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(super) store: VarStore,
    pub(super) optimizer: Optimizer,
    model: Model,
    micro: MicroBatcher,
    memory: Memory,
    dataset: Dataset,
    kind: Kind,
    batch_size: usize,
    micro_batch: usize,
    seed: u64,
    pub(super) epoch: usize,
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
    /// Steps that were run again with smaller micro-batches.
    pub(crate) retries: usize,
    pub(crate) peak_bytes: Bytes,
    pub(crate) samples_per_s: f64,
}

impl Trainer {
    /// A model with its first parameters, inside its memory.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        let device = match &options.device {
            Some(name) => device::find(name)?,
            None if options.memory_limit.is_some() => Device::Cpu,
            None => device::best(),
        };
        let dataset = options.model.data(&options.data, options.seed)?;
        let layers = options.model.layers(&dataset.sample)?;
        let memory = memory(device, options.memory_limit)?;
        let _inside = memory.enter();
        tch::manual_seed(seed_of(options.seed, 0));
        let mut store = VarStore::new(device);
        let model = layers.build(&store.root()).context("the model was not built")?;
        store.set_kind(options.dtype.kind());
        let optimizer = optimizer(&store, options)?;
        let micro = MicroBatcher::new(&store, Size::Fixed(options.micro_batch));
        Ok(Self {
            micro: micro.memory(memory.clone()),
            store,
            optimizer,
            model,
            memory,
            kind: options.dtype.kind(),
            batch_size: match options.batch_size {
                BatchSize::All => dataset.train.len(),
                BatchSize::Samples(samples) => samples,
            },
            micro_batch: options.micro_batch,
            dataset,
            seed: options.seed,
            epoch: 0,
        })
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
        let (mut loss, mut peak) = (0.0, Bytes(0));
        let samples = self.dataset.train.len();
        let order = Tensor::randperm(samples as i64, (Kind::Int64, Device::Cpu));
        for range in split::by_size(samples, self.batch_size)? {
            let chosen = order.narrow(0, range.start as i64, range.len() as i64);
            let step = self.step(&chosen)?;
            loss += step.loss * range.len() as f64 / samples as f64;
            peak = peak.max(step.peak.unwrap_or_default());
            progress(step.loss);
        }
        let seconds = start.elapsed().as_secs_f64();
        let (test_loss, test_accuracy) = self.test()?;
        self.epoch += 1;
        Ok(Epoch {
            epoch: self.epoch,
            loss,
            test_loss,
            test_accuracy,
            micro_batch_size: self.micro_batch.min(self.batch_size),
            retries: 0,
            peak_bytes: peak.max(self.memory.usage()?.peak),
            samples_per_s: samples as f64 / seconds,
        })
    }

    /// One step on the chosen samples.
    fn step(&mut self, chosen: &Tensor) -> Result<brimful::Step> {
        let Examples { inputs, targets } = &self.dataset.train;
        let batch = (inputs.index_select(0, chosen), targets.index_select(0, chosen));
        let (model, kind) = (&self.model, self.kind);
        let step = self
            .micro
            .backward(&batch, |(x, y)| {
                Loss::mean(cross_entropy(&model.forward_t(&typed(&x, kind), true), &y))
            })
            .map_err(|error| self.advise(error))?;
        let _inside = self.memory.enter();
        self.optimizer.step()?;
        self.optimizer.zero_grad()?;
        Ok(step)
    }

    /// The loss and the share of right answers on the test samples.
    fn test(&mut self) -> Result<(f64, f64)> {
        let Examples { inputs, targets } = &self.dataset.test;
        let batch = (inputs.shallow_clone(), targets.shallow_clone());
        let (model, kind) = (&self.model, self.kind);
        let step = self.micro.evaluate(&batch, |(x, y)| {
            let logits = model.forward_t(&typed(&x, kind), false);
            let right = logits.argmax(-1, false).eq_tensor(&y);
            (Loss::mean(cross_entropy(&logits, &y)), right)
        })?;
        Ok((step.loss, step.outputs.to_kind(Kind::Double).mean(Kind::Double).double_value(&[])))
    }

    /// Runs the first mini-batch whole, as a plain loop would.
    pub(crate) fn plain_step(&mut self) -> brimful::Result<f64> {
        let samples = self.batch_size.min(self.dataset.train.len());
        let Examples { inputs, targets } = &self.dataset.train;
        let whole = (inputs.shallow_clone(), targets.shallow_clone());
        let batch = batch::slice(&whole, 0..samples)?;
        let (model, kind) = (&self.model, self.kind);
        let mut plain = MicroBatcher::new(&self.store, Size::Count(1)).memory(self.memory.clone());
        let step = plain.backward(&batch, |(x, y)| {
            Loss::mean(cross_entropy(&model.forward_t(&typed(&x, kind), true), &y))
        })?;
        self.optimizer.zero_grad()?;
        Ok(step.loss)
    }

    fn advise(&self, error: Error) -> anyhow::Error {
        match error {
            Error::OutOfMemory(_) if self.micro_batch > 1 => anyhow::Error::from(error)
                .context(format!("try --micro-batch {}", self.micro_batch.div_ceil(2))),
            _ => error.into(),
        }
    }
}

fn memory(device: Device, limit: Option<Bytes>) -> Result<Memory> {
    Ok(match (device, limit) {
        (Device::Cpu, Some(limit)) => Memory::Arena(Arena::limited("cpu", limit.0)?),
        _ => Memory::of(device)?,
    })
}

fn optimizer(store: &VarStore, options: &Options) -> Result<Optimizer> {
    let rate = |default| options.learning_rate.unwrap_or(default);
    Ok(match options.optimizer {
        OptimizerName::Sgd => Optimizer::new(store, Sgd::new(rate(0.05)).momentum(0.9))?,
        OptimizerName::Adam => Optimizer::new(store, Adam::new(rate(1e-3)))?,
        OptimizerName::Adamw => Optimizer::new(store, AdamW::new(rate(1e-3)))?,
    })
}

/// A seed for each epoch, and for what comes before them (0), that are not neighbours.
fn seed_of(seed: u64, epoch: usize) -> i64 {
    let mixed = (seed ^ (epoch as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)).rotate_left(17);
    i64::from_ne_bytes(mixed.to_ne_bytes())
}
