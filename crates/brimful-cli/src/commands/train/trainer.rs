//! The training loop: an epoch of steps, each one mini-batch, and a test.

use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use brimful::auto::Decision;
use brimful::report::{Record, Recorder};
use brimful::{Bytes, Size, World, batch, split};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::advice::FailedStep;
use super::engine::{self, TrainingEngine};
use super::length::Length;
use super::offload::MeasuredInputs;
use super::recipe::Recipe;
use super::running::Running;
use super::tested::TestsSoFar;
use super::trained_model::TrainedModel;
use super::{TrainOptions, records};
use crate::data::{Dataset, Examples, Sample};
use crate::exit::wrong_use;
use crate::fine_tune::FineTune;
use crate::log_files::TestFigures;
use crate::progress::Ticker;
use crate::setting::counted;

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    pub(super) engine: Box<dyn TrainingEngine>,
    pub(super) world: World,
    /// What it is trained from, where that is a folder.
    pub(super) folder: Option<Arc<FineTune>>,
    /// In how many parts the ranks bring a mini-batch.
    parts: usize,
    dataset: Dataset,
    /// The mini-batches of each step of an epoch: near-equal, but for those that the last step lacks.
    windows: Vec<Vec<Range<usize>>>,
    size: Size,
    seed: u64,
    /// The learning rate at its full height.
    pub(super) rate: f64,
    recipe: Recipe,
    length: Length,
    /// The size that was found, where it is automatic.
    found: Option<usize>,
    pub(super) epoch: usize,
    /// What the epoch that runs has come to so far.
    pub(super) running: Running,
    /// The order of its samples, once it has begun.
    order: Option<Tensor>,
    pub(super) tests: TestsSoFar,
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

/// What a test came to.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Test {
    /// How many steps were before it.
    pub(super) step: usize,
    /// The epoch that they belong to, counted from 1.
    #[serde(skip)]
    epoch: usize,
    pub(super) test_loss: f64,
    pub(super) test_accuracy: f64,
    /// Whether no test before had so low a loss.
    pub(super) best: bool,
}

impl Test {
    /// As a log tells of it.
    pub(super) fn figures(&self) -> TestFigures {
        let Self { step, epoch, test_loss, test_accuracy, .. } = *self;
        TestFigures { step, epoch, loss: test_loss, accuracy: test_accuracy }
    }
}

impl Trainer {
    /// A model with its first parameters, on one device, on several, or in stages.
    pub fn new(options: &TrainOptions) -> Result<Self> {
        let model = TrainedModel::open(options)?;
        let dataset = model.data(options)?;
        ensure!(
            options.sequence.is_none() || matches!(dataset.sample, Sample::Sequence { .. }),
            wrong_use(format!("--sequence is for text, but --data {} is none", options.data))
        );
        let layers = model.layers(&dataset.sample, options.batch_norm)?;
        let batch_size = options.batch_size.of(dataset.train.len());
        tch::manual_seed(seed_of(options.seed, 0, 0));
        let world = options.ranks.world()?;
        let inputs = || {
            let samples = micro_batch_size(options.size(), batch_size);
            let micro_batch = batch::slice(&dataset.train.inputs, 0..samples)?;
            Ok(MeasuredInputs { micro_batch, batch_size })
        };
        let engine = engine::build(layers, &world, options, dataset.train.mean_over(), inputs)?;
        let recorder = records::recorder(options, &*engine, &dataset)?;
        let batches = split::by_size(dataset.train.len(), batch_size)?;
        let windows: Vec<_> =
            batches.chunks(options.recipe.accumulate).map(<[Range<usize>]>::to_vec).collect();
        Ok(Self {
            engine,
            parts: options.ranks.parts(&world),
            world,
            folder: model.folder(),
            dataset,
            size: options.size(),
            seed: options.seed,
            rate: options.recipe.method().learning_rate(),
            recipe: options.recipe.clone(),
            windows,
            length: options.length.clone(),
            found: None,
            epoch: 0,
            running: Running::default(),
            order: None,
            tests: TestsSoFar::default(),
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

    /// Whether averages of the weights are what it comes to.
    pub(super) fn averages_weights(&self) -> bool {
        self.recipe.ema.is_some()
    }

    /// How many steps an epoch has.
    pub(crate) fn steps(&self) -> usize {
        self.windows.len()
    }

    /// Steps that are done, of all epochs together.
    pub(super) fn steps_done(&self) -> usize {
        self.epoch * self.steps() + self.running.steps
    }

    /// Samples that were trained on, all epochs together.
    pub(super) fn samples_done(&self) -> usize {
        let begun = self.windows.iter().take(self.running.steps).flatten().map(Range::len);
        self.epoch * self.dataset.train.len() + begun.sum::<usize>()
    }

    /// Samples that there are to train on, in all epochs together.
    pub(super) fn samples_to_do(&self) -> usize {
        let all = self.length.steps(self.steps());
        let last = self.windows.iter().take(all % self.steps()).flatten().map(Range::len);
        all / self.steps() * self.dataset.train.len() + last.sum::<usize>()
    }

    /// Whether all steps of the running epoch are done, and what they came to is to be told.
    pub(super) fn is_epoch_over(&self) -> bool {
        self.running.steps == self.steps()
    }

    /// Whether nothing is left to train.
    pub(super) fn is_over(&self) -> bool {
        self.steps_done() >= self.length.steps(self.steps()) || self.has_stopped_improving()
    }

    /// Why nothing is left, and what would leave something.
    pub(super) fn why_over(&self) -> String {
        let Length { epochs, max_steps, .. } = self.length;
        let steps = self.steps_done();
        match (self.has_stopped_improving(), max_steps) {
            (true, _) => {
                let tests = self.tests.since_best;
                format!("the last {tests} tests were no better than the best: raise --stop-after")
            }
            (_, Some(most)) if steps >= most => {
                format!("{steps} steps are done already: raise --max-steps to go on")
            }
            _ => {
                let done = self.epoch;
                format!(
                    "{done} epochs are done already, and --epochs is {epochs}: give a larger number \
                     to go on"
                )
            }
        }
    }

    /// Whether the tests have ended the run before its time.
    fn has_stopped_improving(&self) -> bool {
        self.tests.stopped_improving(self.length.stop_after)
    }

    /// Whether a test is due in the midst of an epoch: after the last step there is always one.
    pub(super) fn is_test_due(&self) -> bool {
        let steps = self.steps_done();
        let due = self.length.tests_after(steps) || steps == self.length.steps(self.steps());
        due && steps > 0 && self.tests.last != Some(steps)
    }

    /// That of the next step.
    pub(super) fn learning_rate(&self) -> f64 {
        let curve = self.recipe.curve(self.rate, self.length.steps(self.steps()));
        curve.at(self.steps_done())
    }

    /// Trains on every sample once, and tests; or goes on where an epoch was broken off.
    pub fn run_epoch(&mut self) -> Result<Epoch> {
        while !self.is_epoch_over() {
            let step = self.step(None)?;
            self.recorder.step(step);
        }
        Ok(self.finish_epoch()?.0)
    }

    /// Takes the next step of the epoch, which the caller records; `ticker` counts its samples while it
    /// runs.
    ///
    /// The random numbers of an epoch's order and of every step come from seeds of their own, so
    /// that what is run again or broken off and gone on with is the same.
    pub(super) fn step(&mut self, ticker: Option<Ticker>) -> Result<Record> {
        let start = Instant::now();
        let order = match self.order.take() {
            Some(order) => order,
            None => self.new_order(),
        };
        tch::manual_seed(seed_of(self.seed, self.epoch + 1, self.running.steps + 1));
        self.engine.set_learning_rate(self.learning_rate())?;
        let window = &self.windows[self.running.steps];
        let batches = window.iter().map(|range| {
            let chosen = order.narrow(0, range.start as i64, range.len() as i64);
            self.own_part(self.dataset.train.choose(&chosen))
        });
        let batches = batches.collect::<Result<Vec<_>>>()?;
        // One rank's samples are not the step's.
        let ticker = ticker.filter(|_| self.parts == 1);
        let step =
            self.engine.step(batches, ticker).map_err(|error| self.failed_step().advise(error))?;
        self.order = Some(order);
        self.note(&step, start.elapsed());
        Ok(step)
    }

    fn failed_step(&self) -> FailedStep {
        let window = &self.windows[self.running.steps];
        FailedStep {
            epoch: self.epoch + 1,
            step: self.running.steps + 1,
            size: self.size,
            batch_size: window.iter().map(Range::len).max().unwrap_or_default(),
            learning_rate: self.learning_rate(),
            fixed: self.engine.fixed_bytes(),
        }
    }

    /// The samples in the order of this epoch.
    fn new_order(&self) -> Tensor {
        tch::manual_seed(seed_of(self.seed, self.epoch + 1, 0));
        Tensor::randperm(self.dataset.train.len() as i64, (Kind::Int64, Device::Cpu))
    }

    fn note(&mut self, step: &Record, time: Duration) {
        let share = step.samples as f64 / self.dataset.train.len() as f64;
        self.running.add(step, share, time);
        self.found = self.running.size().or(self.found);
    }

    /// Tests, and tells what the epoch came to, whose steps are all done.
    pub(super) fn finish_epoch(&mut self) -> Result<(Epoch, Test)> {
        let test = self.test()?;
        let Test { test_loss, test_accuracy, .. } = test;
        let samples_per_s = self.running.samples_per_s();
        let Running { loss, peak, retries, decisions, .. } = mem::take(&mut self.running);
        self.epoch += 1;
        self.order = None;
        let epoch = Epoch {
            epoch: self.epoch,
            loss,
            test_loss,
            test_accuracy,
            micro_batch_size: (self.found)
                .unwrap_or_else(|| micro_batch_size(self.size, self.windows[0][0].len())),
            retries,
            decisions,
            peak_bytes: peak,
            samples_per_s,
        };
        Ok((epoch, test))
    }

    /// Tests the model as it is now.
    pub(super) fn test(&mut self) -> Result<Test> {
        let (test_loss, test_accuracy) = self.judge()?;
        self.recorder.test(test_loss, Some(test_accuracy));
        let step = self.steps_done();
        let best = self.tests.add(test_loss, step);
        Ok(Test { step, epoch: self.epoch + 1, test_loss, test_accuracy, best })
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
    fn judge(&mut self) -> Result<(f64, f64)> {
        let Examples { inputs, targets } = &self.dataset.test;
        let part = self.own_part((inputs.shallow_clone(), targets.shallow_clone()))?;
        let answers = counted(&part.1).double_value(&[]);
        let (loss, right) = self.engine.test(part)?;
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
