//! Any loss on the outputs of the whole mini-batch: all forwards, the caller's loss, all backwards.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::error::PipelineError;
use super::job::End;
use super::report::Step;
use super::step::{Tried, attempt, report, settle};
use super::transfer::Tensors;
use super::worker::Worker;
use super::{Pipeline, Work, inputs};
use crate::Result;
use crate::auto::Use;
use crate::batch::{self, Batch};
use crate::crew::{drawing, undisturbed};
use crate::schedule::Actions;
use crate::world::Turn;

/// The model's outputs for a whole mini-batch, in sample order and on the last stage's device.
///
/// They are leaves of a graph of their own: compute a loss from them, call its `backward`, and give
/// them to [`Pipeline::backward`]. A model of one output can be used as that tensor.
#[derive(Debug)]
pub struct Outputs {
    tensors: Vec<Tensor>,
    ranges: Vec<Range<usize>>,
    number: u64,
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

/// A forward that waits for its backward.
struct Forward {
    /// Those of this rank's last stage, by micro-batch.
    outputs: Vec<Vec<Tensor>>,
    seed: u64,
    actions: Arc<Actions>,
    ranges: Vec<Range<usize>>,
    turn: Turn,
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
    /// As [`Pipeline::step`].
    pub fn forward(&mut self, input: &impl Batch) -> Result<Outputs> {
        let start = Instant::now();
        self.open = None;
        let samples = batch::len(input)?;
        let (Forward { outputs, seed, actions, ranges, turn }, _) =
            self.sized(self.size, Use::TrainWhole, input, samples, |this, ranges| {
                this.try_forward(input, ranges, start)
            })?;
        let tensors =
            self.ranks.model_outputs(self.layout.last_worker(), self.output_device(), outputs)?;
        let traced = |t: Tensor| {
            let floating = t.is_floating_point();
            Ok(t.f_detach()?.f_set_requires_grad(floating)?)
        };
        let tensors = tensors.into_iter().map(traced).collect::<Result<Vec<_>>>()?;
        self.forwards += 1;
        self.open = Some((self.forwards, turn));
        Ok(Outputs { tensors, ranges, number: self.forwards, seed, start, actions })
    }

    fn try_forward(
        &mut self,
        input: &impl Batch,
        ranges: &[Range<usize>],
        start: Instant,
    ) -> Result<Forward> {
        let portion = self.ranks.portion(ranges)?;
        let actions = self.actions(portion.own().len().max(1))?;
        let actions = Arc::new(actions.in_two_phases(self.recompute)?);
        let inputs = inputs(input, portion.own())?;
        drawing(&self.devices, |seed| {
            let seed = self.ranks.open("forward", &[input], seed)?;
            let turn = self.ranks.world.turn()?;
            let (portion, end) = (&portion, End::Gather);
            let work = Work { portion, inputs, end, train: true, seed, start };
            let jobs = self.jobs(&actions, work, &turn)?;
            let forward = |worker: &mut Worker, job| worker.attempt_forward(job);
            let Tried { outputs, .. } = attempt(&self.crew(), &self.ranks, &turn, jobs, forward)?;
            let (actions, ranges) = (Arc::clone(&actions), ranges.to_vec());
            Ok(Forward { outputs, seed, actions, ranges, turn })
        })
    }

    /// Runs backward from the outputs' gradients, and adds to the parameters' gradients what the
    /// plain model would have added.
    ///
    /// # Errors
    /// When the outputs are not of the last forward or have no gradient; and as [`Pipeline::step`].
    pub fn backward(&mut self, outputs: Outputs) -> Result<Step> {
        let Outputs { tensors, ranges, number, seed, start, actions } = outputs;
        if self.open.as_ref().is_none_or(|(open, _)| *open != number) {
            return Err(PipelineError::OldOutputs.into());
        }
        let portion = self.ranks.portion(&ranges)?;
        let mut gradients = Some(cut(&tensors, portion.own())?);
        let (crew, ranks) = (self.crew(), &self.ranks);
        let mut job = |worker| gradients.take_if(|_| worker == self.layout.last_worker());
        let workers = ranks.here().filter(|_| !portion.own().is_empty());
        let jobs = workers.map(|worker| job(worker).unwrap_or_default()).collect();
        let Some((_, turn)) = &self.open else { return Err(PipelineError::OldOutputs.into()) };
        let backward = |worker: &mut Worker, job| worker.attempt_backward(job);
        let again = || attempt(&crew, ranks, turn, jobs, backward);
        let attempted = undisturbed(&self.devices, again);
        let settled = attempted.and_then(|Tried { mut told, .. }| {
            settle(&crew, ranks, turn, &mut told, portion.samples()).map(|_| told)
        });
        drop(crew);
        self.open = None;
        let told = settled?;
        Ok(report(told, &ranges, start, seed, actions, f64::NAN, Vec::new()))
    }
}

/// Each micro-batch's rows of the outputs' gradients.
fn cut(outputs: &[Tensor], ranges: &[Range<usize>]) -> Result<Vec<Tensors>> {
    let whole: Vec<Tensor> = outputs.iter().map(Tensor::grad).collect();
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
