//! Any loss on the outputs of the whole mini-batch: all forwards, the caller's loss, all backwards.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::error::PipelineError;
use super::job::End;
use super::report::Step;
use super::step::{Tried, attempt, report, settle, undone_unless};
use super::transfer::Tensors;
use super::worker::Worker;
use super::{Pipeline, Work, training_inputs};
use crate::auto::Use;
use crate::batch::{self, Batch};
use crate::crew::{drawing, undisturbed};
use crate::micro::tally::Tally;
use crate::schedule::Actions;
use crate::world::Turn;
use crate::{Result, crew, oom};

/// The model's outputs for a whole mini-batch, in sample order and on the last stage's device.
///
/// They are leaves of a graph of their own: compute a loss from them, call its `backward`, and give
/// them to [`Pipeline::backward`]. A model of one output can be used as that tensor.
#[derive(Debug)]
pub struct Outputs {
    tensors: Vec<Tensor>,
    /// Which forward they are of.
    number: u64,
    course: Course,
}

/// How a step is run.
#[derive(Debug)]
struct Course {
    ranges: Vec<Range<usize>>,
    seed: u64,
    start: Instant,
    actions: Arc<Actions>,
}

impl Outputs {
    /// All of them.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
}

impl Deref for Outputs {
    type Target = Tensor;

    /// The first output.
    fn deref(&self) -> &Tensor {
        &self.tensors[0]
    }
}

impl Pipeline {
    /// Runs forward in training, and keeps what [`Pipeline::backward`] needs.
    ///
    /// All forwards come before the first backward, so every stage holds all micro-batches, as with
    /// GPipe; with recompute, it holds their inputs alone. To look at outputs without training, use
    /// [`Pipeline::eval`].
    ///
    /// ```
    /// # use brimful::{Layers, Pipeline};
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # let layers = Layers::new().add("linear", |p| nn::linear(p, 4, 4, Default::default()));
    /// # let mut pipe = Pipeline::builder(layers).micro_batches(4).build()?;
    /// # let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
    /// let out = pipe.forward(&x)?;
    /// let likeness = out.matmul(&out.tr()); // every sample with every other
    /// likeness.square().mean(Kind::Float).backward();
    /// pipe.backward(out)?;
    /// # Ok::<(), brimful::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the size is automatic, which needs a step that can be tried again:
    /// [`Pipeline::step_whole`]; and as [`Pipeline::step`].
    pub fn forward(&mut self, input: &impl Batch) -> Result<Outputs> {
        let start = Instant::now();
        self.open = None;
        let ranges = self.size.cut(batch::len(input)?)?.ok_or(PipelineError::AutomaticForward)?;
        let ranges = self.ranks.dealt(ranges, self.size)?;
        let actions = self.actions_in_two_phases(&ranges)?;
        let (outputs, turn) = drawing(&self.devices, |seed| {
            self.all_forwards(input, Course { ranges, seed, start, actions })
        })?;
        self.forwards += 1;
        self.open = Some((self.forwards, turn));
        Ok(Outputs { number: self.forwards, ..outputs })
    }

    /// Runs backward from the outputs' gradients, and adds to the parameters' gradients what the
    /// plain model would have added. The step's loss, which it does not know, is NaN.
    ///
    /// # Errors
    /// When the outputs are not of the last forward or have no gradient; and as [`Pipeline::step`].
    pub fn backward(&mut self, outputs: Outputs) -> Result<Step> {
        let open = self.open.take_if(|(open, _)| *open == outputs.number);
        let (_, turn) = open.ok_or(PipelineError::OldOutputs)?;
        let gradients = outputs.tensors.iter().map(Tensor::grad).collect();
        undisturbed(&self.devices, || {
            self.all_backwards(outputs.course, gradients, &turn, f64::NAN)
        })
    }

    /// Runs forward, any loss on the outputs of the whole mini-batch, and backward, as one step: where
    /// memory runs out in any of them, an automatic size tries again with smaller micro-batches.
    ///
    /// Gradients are the stages' alone: parameters that the loss has of its own get none, which takes
    /// [`Pipeline::forward`] and [`Pipeline::backward`].
    ///
    /// ```
    /// # use brimful::{Layers, Pipeline, Size};
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # let layers = Layers::new().add("linear", |p| nn::linear(p, 4, 4, Default::default()));
    /// # let mut pipe = Pipeline::builder(layers).micro_batches(Size::Auto).build()?;
    /// # let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
    /// let step = pipe.step_whole(&x, |out| out.matmul(&out.tr()).square().mean(Kind::Float))?;
    /// assert!(step.loss.is_finite());
    /// # Ok::<(), brimful::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn step_whole(
        &mut self,
        input: &impl Batch,
        mut loss: impl FnMut(&Outputs) -> Tensor,
    ) -> Result<Step> {
        self.open = None;
        let samples = batch::len(input)?;
        let (step, story) =
            self.sized(self.size, Use::TrainWhole, input, samples, |this, ranges| {
                let start = Instant::now();
                let (actions, ranges) = (this.actions_in_two_phases(ranges)?, ranges.to_vec());
                drawing(&this.devices, |seed| {
                    let course = Course { ranges, seed, start, actions };
                    let (outputs, turn) = this.all_forwards(input, course)?;
                    let (loss, gradients) = this.loss_of(&outputs, &turn, &mut loss)?;
                    this.all_backwards(outputs.course, gradients, &turn, loss)
                })
            })?;
        Ok(step.with_story(story))
    }

    fn actions_in_two_phases(&mut self, ranges: &[Range<usize>]) -> Result<Arc<Actions>> {
        let own = self.ranks.portion(ranges)?.own().len();
        Ok(Arc::new(self.actions(own.max(1))?.in_two_phases(self.recompute)?))
    }

    fn all_forwards(&self, input: &impl Batch, course: Course) -> Result<(Outputs, Turn)> {
        let Course { ranges, seed, start, actions } = course;
        let portion = self.ranks.portion(&ranges)?;
        let inputs = training_inputs(input, portion.own())?;
        let seed = self.open("forward", &[input], seed)?;
        self.ranks.check_trained(&self.crew())?;
        let turn = self.ranks.world.turn()?;
        let work = Work { portion: &portion, inputs, end: End::Gather, train: true, seed, start };
        let jobs = self.jobs(&actions, work, &turn)?;
        let forward = |worker: &mut Worker, job| worker.attempt_forward(job);
        let Tried { outputs, .. } = attempt(&self.crew(), &self.ranks, &turn, jobs, forward)?;
        let (last, device) = (self.layout.last_worker(), self.output_device());
        let outputs = self.ranks.model_outputs(last, device, outputs)?;
        let leaf = |t: Tensor| {
            let floating = t.is_floating_point();
            Ok(t.f_detach()?.f_set_requires_grad(floating)?)
        };
        let tensors = outputs.into_iter().map(leaf).collect::<Result<_>>()?;
        let course = Course { ranges, seed, start, actions };
        Ok((Outputs { tensors, number: 0, course }, turn))
    }

    /// The loss, and its gradient for each output; where that fails in any rank, all is undone.
    fn loss_of(
        &self,
        outputs: &Outputs,
        turn: &Turn,
        loss: &mut impl FnMut(&Outputs) -> Tensor,
    ) -> Result<(f64, Vec<Tensor>)> {
        let start = Instant::now();
        let run = || {
            let (tally, loss) = Tally::of_whole(loss(outputs))?;
            let value = tally.read(self.non_finite)?.totals()?.loss;
            Ok((value, gradients(&loss, &outputs.tensors)?))
        };
        let found = oom::catch(run).map_err(crew::of);
        let told = found.as_ref().map(drop).map_err(|error| (start.elapsed(), error.clone()));
        undone_unless(&self.crew(), self.ranks.settle("loss", turn, told))?;
        found
    }

    fn all_backwards(
        &self,
        course: Course,
        gradients: Vec<Tensor>,
        turn: &Turn,
        loss: f64,
    ) -> Result<Step> {
        let Course { ranges, seed, start, actions } = course;
        let portion = self.ranks.portion(&ranges)?;
        let (crew, ranks) = (self.crew(), &self.ranks);
        let mut gradients = Some(undone_unless(&crew, cut(&gradients, portion.own()))?);
        let mut job = |worker| gradients.take_if(|_| worker == self.layout.last_worker());
        let workers = ranks.here().filter(|_| !portion.own().is_empty());
        let jobs = workers.map(|worker| job(worker).unwrap_or_default()).collect();
        let backward = |worker: &mut Worker, job| worker.attempt_backward(job);
        let Tried { mut told, .. } = attempt(&crew, ranks, turn, jobs, backward)?;
        settle(&crew, ranks, turn, &mut told, portion.samples())?;
        Ok(report(told, &ranges, start, seed, actions, loss, Vec::new()))
    }
}

/// The gradient of a loss for each of these leaves; undefined where it does not depend on one.
fn gradients(loss: &Tensor, leaves: &[Tensor]) -> Result<Vec<Tensor>> {
    let traced: Vec<&Tensor> = leaves.iter().filter(|leaf| leaf.requires_grad()).collect();
    let mut found = Tensor::f_run_backward(&[loss], &traced, false, false)?.into_iter();
    let of = |leaf: &Tensor| if leaf.requires_grad() { found.next() } else { None };
    Ok(leaves.iter().map(of).map(Option::unwrap_or_default).collect())
}

/// Each micro-batch's rows of the outputs' gradients.
fn cut(whole: &[Tensor], ranges: &[Range<usize>]) -> Result<Vec<Tensors>> {
    if !whole.iter().any(Tensor::defined) {
        return Err(PipelineError::NoOutputGradient.into());
    }
    let rows = |gradient: &Tensor, range: &Range<usize>| {
        let rows = || gradient.f_narrow(0, range.start as i64, range.len() as i64);
        gradient.defined().then(rows).transpose()
    };
    let row = |range: &Range<usize>| {
        let parts = whole.iter().map(|gradient| rows(gradient, range));
        Ok(vec![parts.collect::<Result<_, _>>()?])
    };
    ranges.iter().map(row).collect()
}
