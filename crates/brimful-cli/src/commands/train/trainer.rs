//! The training loop: an epoch of steps, each one mini-batch, and a test.

use std::mem;
use std::ops::{ControlFlow, Range};
use std::time::Instant;

use anyhow::Result;
use brimful::auto::Decision;
use brimful::report::{Record, Recorder};
use brimful::{Bytes, Size, World, batch, split};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::engine::TrainingEngine;
use super::pipelined::Pipelined;
use super::rate::Rate;
use super::running::Running;
use super::whole_model::WholeModel;
use super::{BatchSize, TrainOptions, advice, records};
use crate::data::{Dataset, Examples};
use crate::setting::DROPOUT;

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    pub(super) engine: Box<dyn TrainingEngine>,
    pub(super) world: World,
    /// In how many parts the ranks bring a mini-batch.
    parts: usize,
    dataset: Dataset,
    /// The mini-batches of an epoch, near-equal.
    batches: Vec<Range<usize>>,
    size: Size,
    seed: u64,
    pub(super) rate: Rate,
    /// The size that was found, where it is automatic.
    found: Option<usize>,
    pub(super) epoch: usize,
    /// What the epoch that runs has come to so far.
    pub(super) running: Running,
    pub(super) recorder: Recorder,
}

/// What an epoch came to.
#[derive(Debug, Clone, Serialize)]
pub struct Epoch {
    pub epoch: usize,
    /// The mean loss of its samples in training.
    pub loss: f64,
    pub test_loss: f64,
    pub test_accuracy: f64,
    pub micro_batch_size: usize,
    /// How often a step was run again with smaller micro-batches.
    pub retries: usize,
    /// What changed about an automatic size, and why.
    pub decisions: Vec<Decision>,
    pub peak_bytes: Bytes,
    pub samples_per_s: f64,
}

impl Trainer {
    /// A model with its first parameters, on one device, on several, or in stages.
    pub fn new(options: &TrainOptions) -> Result<Self> {
        let dataset = options.model.data(&options.data, options.seed)?;
        let layers = options.model.layers(&dataset.sample, DROPOUT)?;
        let batch_size = match options.batch_size {
            BatchSize::All => dataset.train.len(),
            BatchSize::Samples(samples) => samples.min(dataset.train.len()),
        };
        tch::manual_seed(seed_of(options.seed, 0, 0));
        let world = options.ranks.world()?;
        let whole = options.ranks.whole_models(&world).filter(|_| options.stages.stages.is_none());
        let engine: Box<dyn TrainingEngine> = match whole {
            Some(each) => Box::new(WholeModel::new(layers, each, &world, options)?),
            None => {
                let samples = micro_batch_size(options.size(), batch_size);
                let sample = batch::slice(&dataset.train.inputs, 0..samples)?;
                Box::new(Pipelined::new(layers, &world, options, &sample)?)
            }
        };
        let recorder = records::recorder(options, &*engine, &dataset)?;
        let batches = split::by_size(dataset.train.len(), batch_size)?;
        let steps = options.epochs * batches.len();
        let first = options.method().learning_rate();
        Ok(Self {
            engine,
            parts: options.ranks.parts(&world),
            world,
            dataset,
            batches,
            size: options.size(),
            seed: options.seed,
            rate: Rate::new(first, options.learning_rate_decay, steps),
            found: None,
            epoch: 0,
            running: Running::default(),
            recorder,
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
        self.batches.len()
    }

    /// Samples that were trained on, all epochs together.
    pub(super) fn samples_done(&self) -> usize {
        let begun = self.batches.iter().take(self.running.steps).map(Range::len);
        self.epoch * self.dataset.train.len() + begun.sum::<usize>()
    }

    /// Trains on every sample once, and tests; or goes on where an epoch was broken off. `watch`
    /// hears of every step, and may break the epoch off: then there is nothing to tell of it yet.
    ///
    /// The random numbers of an epoch's order and of every step come from seeds of their own, so
    /// that what is run again or broken off and gone on with is the same.
    pub fn run_epoch(
        &mut self,
        mut watch: impl FnMut(&Record) -> ControlFlow<()>,
    ) -> Result<Option<Epoch>> {
        let (start, before) = (Instant::now(), self.samples_done());
        let order = self.order();
        for range in self.batches.clone().into_iter().skip(self.running.steps) {
            tch::manual_seed(seed_of(self.seed, self.epoch + 1, self.running.steps + 1));
            let steps = self.epoch * self.steps() + self.running.steps;
            self.engine.set_learning_rate(self.rate.after(steps))?;
            let chosen = order.narrow(0, range.start as i64, range.len() as i64);
            let step = self.step(&chosen)?;
            let flow = watch(&step);
            self.note(step);
            if flow.is_break() {
                return Ok(None);
            }
        }
        let rate = (self.samples_done() - before) as f64 / start.elapsed().as_secs_f64();
        self.finish(rate).map(Some)
    }

    /// The samples in the order of this epoch.
    fn order(&self) -> Tensor {
        tch::manual_seed(seed_of(self.seed, self.epoch + 1, 0));
        Tensor::randperm(self.dataset.train.len() as i64, (Kind::Int64, Device::Cpu))
    }

    fn note(&mut self, step: Record) {
        let share = step.samples as f64 / self.dataset.train.len() as f64;
        self.running.add(&step, share);
        self.found = self.running.size().or(self.found);
        self.recorder.step(step);
    }

    fn finish(&mut self, samples_per_s: f64) -> Result<Epoch> {
        let (test_loss, test_accuracy) = self.test()?;
        self.recorder.test(test_loss, Some(test_accuracy));
        let Running { loss, peak, retries, decisions, .. } = mem::take(&mut self.running);
        self.epoch += 1;
        Ok(Epoch {
            epoch: self.epoch,
            loss,
            test_loss,
            test_accuracy,
            micro_batch_size: (self.found)
                .unwrap_or_else(|| micro_batch_size(self.size, self.batches[0].len())),
            retries,
            decisions,
            peak_bytes: peak,
            samples_per_s,
        })
    }

    /// One step on the chosen samples.
    fn step(&mut self, chosen: &Tensor) -> Result<Record> {
        let Examples { inputs, targets } = &self.dataset.train;
        let batch = (inputs.index_select(0, chosen), targets.index_select(0, chosen));
        let (size, samples) = (self.size, chosen.numel());
        let part = self.own_part(batch)?;
        self.engine.step(part).map_err(|error| advice::on(error, size, samples))
    }

    /// This rank's part of a mini-batch, which all ranks have.
    fn own_part(&self, (x, y): (Tensor, Tensor)) -> Result<(Tensor, Tensor)> {
        let samples = batch::len(&x)?;
        let ranks = self.world.size() / self.parts;
        let parts = split::by_count(samples, self.parts)?;
        let own = parts.get(self.world.rank() / ranks).cloned().unwrap_or(samples..samples);
        let (start, length) = (own.start as i64, own.len() as i64);
        Ok((x.f_narrow(0, start, length)?, y.f_narrow(0, start, length)?))
    }

    /// The loss and the share of right answers on the test samples.
    fn test(&mut self) -> Result<(f64, f64)> {
        let Examples { inputs, targets } = &self.dataset.test;
        let part = self.own_part((inputs.shallow_clone(), targets.shallow_clone()))?;
        let (loss, right) = self.engine.test(part)?;
        let answers = right.numel() as f64;
        let right = right.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
        // Of all ranks: those of one pipeline count the same answers, as often each.
        let all = Tensor::from_slice(&[right, answers]);
        self.world.sum(&[all.shallow_clone()])?;
        Ok((loss, all.double_value(&[0]) / all.double_value(&[1])))
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

/// A seed for each step of each epoch, for the epoch's order (step 0), and for what comes before
/// them all (epoch 0), that are not neighbours.
fn seed_of(seed: u64, epoch: usize, step: usize) -> i64 {
    let epoch = (epoch as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let step = (step as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
    i64::from_ne_bytes((seed ^ epoch ^ step).rotate_left(17).to_ne_bytes())
}
