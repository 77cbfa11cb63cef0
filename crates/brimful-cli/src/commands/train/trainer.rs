//! The training loop: an epoch of steps, and a test. Each step trains on one mini-batch, or on several with
//! `--accumulate`.

use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use brimful::auto::Decision;
use brimful::save::Metadata;
use brimful::{Bytes, Layers, World};
use brimful_plan::split;
use brimful_report::{Record, Recorder};
use serde::Serialize;
use tch::{Kind, Tensor};

use super::checkpoints::ToSave;
use super::engine::Engine;
use super::offload::MeasuredInputs;
use super::options::{Keep, is_due};
use super::recipe::UsualSettings;
use super::run_state::{EpochCut, RunState, Running};
use super::{TrainOptions, advice, moved, records};
use crate::data::{Dataset, Rows, Sample, SampleRequest, SampleWishes, Shuffle};
use crate::exit::ensure_use;
use crate::files::ClaimedPlace;
use crate::log_files::TestFigures;
use crate::model::{FineTune, Model};
use crate::output::numbered;
use crate::progress::Ticker;
use crate::setting::{MeanOver, counted};

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    pub(super) options: TrainOptions,
    /// Default settings of a fine-tuning, for options that were not given.
    pub(super) usual: UsualSettings,
    /// Layers of the model, whose sizes advice depends on.
    pub(super) layers: Layers,
    pub(super) engine: Engine,
    pub(super) world: World,
    /// Pretrained model, if the training starts from a folder.
    pub(super) folder: Option<Arc<FineTune>>,
    /// Number of parts into which the ranks divide a mini-batch.
    parts: usize,
    pub(super) dataset: Dataset,
    pub(super) cut: EpochCut,
    /// Last automatic micro-batch size.
    found: Option<usize>,
    pub(super) state: RunState,
    /// Recorder of the steps, if a record is requested.
    pub(super) recorder: Option<Recorder>,
    /// Fingerprints of the run's data, model and adapter, if the run is saved or resumed.
    pub(super) contents: Metadata,
    /// Lock on the path of `--save`, held while the run lasts.
    _place: Option<ClaimedPlace>,
}

/// Results of an epoch.
#[derive(Debug, Clone, Serialize)]
pub struct Epoch {
    pub epoch: usize,
    /// Mean training loss over the samples of the epoch.
    pub loss: f64,
    pub test_loss: f64,
    pub test_accuracy: f64,
    pub micro_batch_size: usize,
    /// Number of times that a step was repeated with smaller micro-batches.
    pub retries: usize,
    /// Changes of an automatic size, with their reasons.
    pub decisions: Vec<Decision>,
    pub peak_bytes: Bytes,
    pub samples_per_s: f64,
}

impl Trainer {
    /// Builds a model with its initial parameters: on one device, on several devices, or in stages.
    pub fn new(options: &TrainOptions) -> Result<Self> {
        let model = open_model(options)?;
        let usual = UsualSettings::of(&model, options);
        let mut dataset = open_data(&model, options)?;
        let options = &usual.fill_in(options, &dataset.sample);
        let layers = model.layers(&dataset.sample, options.batch_norm)?;
        let batch_size = options.batch_size().of(dataset.train.len());
        dataset.sample.check_room(batch_size)?;
        tch::manual_seed(seed_of(options.seed, 0, 0));
        let world = options.ranks.world()?;
        super::check_ranks(&world, options)?;
        let cut = EpochCut::new(dataset.train.len(), batch_size, options.recipe.accumulate);
        let folder = model.folder().cloned();
        let in_epoch = cut.steps();
        options.recipe.check_warmup(options.length.steps(in_epoch))?;
        let place = match options.takes_part_in_saves(&world) {
            true => {
                let folder = folder.as_deref();
                ToSave { options, layers: &layers, folder, in_epoch }.claim(&world)?
            }
            false => None,
        };
        let over = dataset.train.mean_over();
        let inputs = || {
            let samples = options.guessed_micro_batch(batch_size);
            let examples = dataset.train.bring(&SampleRequest::plain(0..samples))?;
            let (micro_batch, targets) = examples.into_largest();
            Ok(MeasuredInputs { micro_batch, targets, batch_size })
        };
        let engine = Engine::new(layers.clone(), &world, options, over, inputs)
            .map_err(|error| advice::of_building(error, &layers, options))?;
        let recorder = options.is_recorded();
        let recorder = recorder.then(|| records::recorder(options, &engine, &dataset, in_epoch));
        let files = &options.files;
        let contents = match files.save.is_some() || files.resume.is_some() {
            true => moved::contents(options),
            false => Metadata::new(),
        };
        Ok(Self {
            options: options.clone(),
            usual,
            layers,
            engine,
            parts: options.ranks.parts(&world),
            world,
            folder,
            cut,
            dataset,
            found: None,
            state: RunState::new(options.recipe.method().learning_rate()),
            recorder,
            contents,
            _place: place,
        })
    }

    /// Returns the unit of automatic sizes. The unit is tokens for sequences of unlike length, because these are
    /// cut by tokens.
    pub(super) fn unit_of_sizes(&self) -> &'static str {
        match self.dataset.train.mean_over() {
            MeanOver::Samples => "samples",
            MeanOver::Targets => "tokens",
        }
    }

    /// Returns whether this rank takes part in saves, which are collective.
    pub(super) fn takes_part_in_saves(&self) -> bool {
        self.options.takes_part_in_saves(&self.world)
    }

    /// Returns whether this is the rank that prints and writes.
    pub(super) fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// Returns the number of steps in an epoch.
    pub(crate) fn steps(&self) -> usize {
        self.cut.steps()
    }

    /// Returns the number of steps done over all epochs.
    pub(super) fn steps_done(&self) -> usize {
        self.state.epoch * self.steps() + self.state.running.steps
    }

    /// Returns the number of all steps of the run, unless the tests stop the run early.
    fn all_steps(&self) -> usize {
        self.options.length.steps(self.steps())
    }

    /// Returns the number of samples trained on over all epochs.
    pub(super) fn samples_done(&self) -> usize {
        self.state.epoch * self.dataset.train.len() + self.cut.samples_of(self.state.running.steps)
    }

    /// Returns the number of samples to train on over all epochs.
    pub(super) fn samples_to_do(&self) -> usize {
        let all = self.all_steps();
        all / self.steps() * self.dataset.train.len() + self.cut.samples_of(all % self.steps())
    }

    /// Returns whether all steps of the current epoch are done. The epoch's results are then not yet reported.
    pub(super) fn is_epoch_over(&self) -> bool {
        self.state.running.steps == self.steps()
    }

    /// Returns whether the training is complete.
    pub(super) fn is_over(&self) -> bool {
        self.steps_done() >= self.all_steps() || self.has_stopped_improving()
    }

    /// Says why the training is complete, and which flag would continue it.
    pub(super) fn why_over(&self) -> String {
        let epochs = self.options.length.epochs(self.steps());
        let steps = self.steps_done();
        match (self.has_stopped_improving(), self.options.length.max_steps) {
            (true, _) => {
                let tests = self.state.tests.since_best;
                format!("the last {tests} tests were no better than the best: raise --stop-after")
            }
            (_, Some(most)) if steps >= most => {
                format!("{} done already: raise --max-steps to continue", numbered(steps, "step"))
            }
            _ => {
                let done = self.state.epoch;
                format!(
                    "{} done already, and --epochs is {epochs}: give a larger number to continue",
                    numbered(done, "epoch")
                )
            }
        }
    }

    /// Returns whether the tests stop the run early.
    fn has_stopped_improving(&self) -> bool {
        self.state.tests.stopped_improving(self.options.length.stop_after)
    }

    /// Returns whether a test is due within an epoch. After the last step of the training, a test is always due.
    pub(super) fn is_test_due(&self) -> bool {
        let steps = self.steps_done();
        let due = is_due(self.options.length.eval_every, steps) || steps == self.all_steps();
        due && steps > 0 && self.state.tests.last != Some(steps)
    }

    /// Returns the learning rate of the next step.
    pub(super) fn learning_rate(&self) -> f64 {
        self.options.recipe.curve(self.state.rate, self.all_steps()).at(self.steps_done())
    }

    /// Trains on every sample once and tests, or finishes an epoch that was interrupted.
    pub fn run_epoch(&mut self) -> Result<Epoch> {
        while !self.is_epoch_over() {
            let step = self.step(None)?;
            self.record(step);
        }
        Ok(self.finish_epoch()?.0)
    }

    /// Adds a step to the record of the run, if one is requested.
    pub(super) fn record(&mut self, step: Record) {
        if let Some(recorder) = &mut self.recorder {
            recorder.step(step);
        }
    }

    /// Takes the next step of the epoch. The caller records the step. `ticker` counts samples while the step runs.
    ///
    /// The order of each epoch and the random numbers of each step have their own seeds. So a repeated or resumed
    /// step draws the numbers that it drew at first.
    pub(super) fn step(&mut self, ticker: Option<Ticker>) -> Result<Record> {
        let start = Instant::now();
        tch::manual_seed(seed_of(
            self.options.seed,
            self.state.epoch + 1,
            self.state.running.steps + 1,
        ));
        let rate = self.learning_rate();
        self.engine.set_learning_rate(rate)?;
        let batches = self.bring()?;
        // If the ranks divide mini-batches, this rank's samples are not all samples of the step.
        let ticker = ticker.filter(|_| self.parts == 1);
        let step = self.engine.step(batches, ticker).map_err(|error| self.advise(error))?;
        self.note(&step, start.elapsed());
        Ok(step)
    }

    /// Loads the mini-batches of the next step, and starts to prepare the mini-batches of the step after it.
    fn bring(&mut self) -> Result<Vec<(Rows, Rows)>> {
        let (epoch, step) = (self.state.epoch, self.state.running.steps);
        let requests = self.requests(epoch, step)?;
        let brought =
            requests.iter().map(|request| self.dataset.train.bring(request)?.into_batch());
        let brought = brought.collect::<Result<Vec<_>>>()?;
        let is_last = self.steps_done() + 1 >= self.all_steps();
        if self.dataset.train.is_streamed() && !is_last {
            let next = if step + 1 < self.steps() { (epoch, step + 1) } else { (epoch + 1, 0) };
            let requests = self.requests(next.0, next.1)?;
            requests.into_iter().for_each(|request| self.dataset.train.prepare(request));
        }
        Ok(brought)
    }

    /// Returns this rank's samples for a step. Their order in an epoch depends only on the seed and the epoch's
    /// number.
    fn requests(&self, epoch: usize, step: usize) -> Result<Vec<SampleRequest>> {
        let seed = seed_of(self.options.seed, epoch + 1, 0).cast_unsigned();
        let order = Shuffle::new(self.dataset.train.len(), seed);
        let request = |places| {
            let numbers = self.own_part(places)?.map(|place| order.at(place)).collect();
            Ok(SampleRequest { numbers, seed: Some(seed) })
        };
        self.cut.step(step).map(request).collect()
    }

    fn note(&mut self, step: &Record, time: Duration) {
        // Counts the requested samples, because unreadable images are missing from the loaded samples.
        let steps = self.state.running.steps;
        let samples = self.cut.samples_of(steps + 1) - self.cut.samples_of(steps);
        let share = samples as f64 / self.dataset.train.len() as f64;
        self.state.running.add(step, share, time);
        self.found = self.state.running.size().or(self.found);
    }

    /// Tests after the last step of an epoch, and returns the epoch's results.
    pub(super) fn finish_epoch(&mut self) -> Result<(Epoch, TestFigures)> {
        let test = self.test()?;
        let samples_per_s = self.state.running.samples_per_s();
        let Running { loss, peak, retries, decisions, .. } = mem::take(&mut self.state.running);
        self.state.epoch += 1;
        let epoch = Epoch {
            epoch: self.state.epoch,
            loss,
            test_loss: test.loss,
            test_accuracy: test.accuracy,
            micro_batch_size: (self.found)
                .unwrap_or_else(|| self.options.guessed_micro_batch(self.cut.largest())),
            retries,
            decisions,
            peak_bytes: peak,
            samples_per_s,
        };
        Ok((epoch, test))
    }

    /// Tests the model as it is now.
    pub(super) fn test(&mut self) -> Result<TestFigures> {
        let (loss, accuracy) = self.judge()?;
        self.recorder.iter_mut().for_each(|recorder| recorder.test(loss, Some(accuracy)));
        let step = self.steps_done();
        let best = self.state.tests.add(loss, step);
        Ok(TestFigures { step, epoch: self.state.epoch + 1, loss, accuracy, best })
    }

    /// Returns this rank's part of a mini-batch at these positions.
    fn own_part(&self, places: Range<usize>) -> Result<Range<usize>> {
        let ranks = self.world.size() / self.parts;
        let parts = split::by_count(places.len(), self.parts)?;
        let own = parts.get(self.world.rank() / ranks).map(|own| (own.start, own.end));
        let (start, end) = own.unwrap_or((places.len(), places.len()));
        Ok(places.start + start..places.start + end)
    }

    /// Returns the loss and the share of right predictions on the test samples.
    fn judge(&mut self) -> Result<(f64, f64)> {
        let largest = self.cut.largest();
        let at_once = self.dataset.test.at_once(largest);
        // A model in stages keeps all activations between two stages on the device, so a test takes no more
        // samples at once than a step.
        let at_once = if self.engine.schedule().is_some() { at_once.min(largest) } else { at_once };
        let cut = EpochCut::new(self.dataset.test.len(), at_once, 1);
        let (mut losses, mut counts) = (Vec::new(), vec![0.0]);
        let request = |trainer: &Self, part| {
            let mut places = cut.step(part).map(|places| trainer.own_part(places));
            places.next().transpose().map(|own| own.map(SampleRequest::plain))
        };
        let mut next = request(self, 0)?;
        while let Some(wanted) = next {
            let examples = self.dataset.test.bring(&wanted)?;
            next = request(self, losses.len() + 1)?;
            if let Some(next) = &next {
                self.dataset.test.prepare(next.clone());
            }
            counts.push(counted(&examples.targets).double_value(&[]));
            let tested = self.engine.test(examples.into_batch()?);
            let (loss, right) = tested.map_err(|error| self.advise_after_test(error))?;
            counts[0] += right.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
            losses.push(loss);
        }
        // Sums over all ranks. All ranks of one pipeline count the pipeline's samples; the ratio stays the same.
        let all = Tensor::from_slice(&counts);
        self.world.sum(&[all.shallow_clone()])?;
        let counts = Vec::<f64>::try_from(all)?;
        let (loss, answers) = weighted_mean(&losses, &counts[1..]);
        Ok((loss, counts[0] / answers))
    }
}

/// Opens the model that the options name, and refuses options that do not apply to the model.
fn open_model(options: &TrainOptions) -> Result<Model> {
    let model = Model::open(&options.model, &options.fine_tune)?;
    if let (Some(folder), Some(place)) = (model.folder(), options.saved_folder()) {
        folder.check_place(place)?;
        ensure_use!(
            !matches!(options.files.keep, Keep::Newest(_)),
            "--keep N is for a file of --save: give last or best with a folder"
        );
    }
    Ok(model)
}

/// Opens the samples that the options name, and refuses options that do not apply to the samples.
fn open_data(model: &Model, options: &TrainOptions) -> Result<Dataset> {
    let TrainOptions { data, sequence, image, seed, .. } = options;
    let wishes = SampleWishes { sequence: *sequence, image: *image, pixels: None };
    let dataset = model.data(data, wishes, *seed)?;
    ensure_use!(
        sequence.is_none() || matches!(dataset.sample, Sample::Sequence { .. }),
        "--sequence is for text, but --data {data} is not text"
    );
    ensure_use!(
        image.is_none() || !dataset.class_names.is_empty(),
        "--image is for a folder of images, but --data {data} is not one"
    );
    Ok(dataset)
}

/// Returns the weighted mean and the sum of the weights. The mean of a single value is exactly this value.
fn weighted_mean(values: &[f64], weights: &[f64]) -> (f64, f64) {
    values.iter().zip(weights).fold((0.0, 0.0), |(mean, before), (value, weight)| {
        let all = before + weight;
        (mean + (value - mean) * (weight / all), all)
    })
}

/// Returns the seed of a step. Step 0 is for the epoch's order, and epoch 0 for the initial parameters. Nearby
/// steps get seeds that are far apart.
fn seed_of(seed: u64, epoch: usize, step: usize) -> i64 {
    let epoch = (epoch as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let step = (step as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
    i64::from_ne_bytes((seed ^ epoch ^ step).rotate_left(17).to_ne_bytes())
}
