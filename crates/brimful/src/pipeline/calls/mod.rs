//! Calls of a pipeline: forward and backward, with or without a commit, or only forward.

mod outputs;
mod own_actions;
mod whole;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tch::{Device, Tensor};

pub use whole::Outputs;

use crate::auto::Use;
use crate::batch::{self, Arranged, Batch, BatchError, Lender, Samples};
use crate::loss::IntoLoss;
use crate::pipeline::Pipeline;
use crate::pipeline::attempt::{PipelineAttempt, Portion};
use crate::pipeline::error::PipelineError;
use crate::pipeline::run::{LossFn, Mode};
use crate::step::{
    self, Attempt, AttemptContext, Ending, Failed, StepReport, StepRequest, described,
};
use crate::{Error, Loss, Result, feed};

impl Pipeline {
    /// Runs forward and backward, and adds to the parameters' gradients exactly what the plain model
    /// would have added on the whole mini-batch.
    ///
    /// `loss` runs on the last stage's thread, once for each micro-batch, and again if an automatic size
    /// retries the step. It gets the model's output (a [`Tensor`], or several as a `Vec`, an array or a
    /// tuple: [`ModelOutput`]) and the micro-batch's part of `target`, both on that stage's device. It
    /// returns its [`Loss`], or a pair of the loss and outputs, or a `Result` of either.
    ///
    /// # Errors
    /// When anything fails, in any stage: gradients, statistics and random state are then as before, and
    /// the pipeline can be used again.
    pub fn backward<X: Batch, Y: Batch + 'static, M: ModelOutput, R: IntoLoss>(
        &mut self,
        input: &X,
        target: &Y,
        loss: impl FnMut(M, &Y) -> R + Send + 'static,
    ) -> Result<StepReport<R::Outputs>> {
        let traced = check_no_gradients(input);
        let loss = with_loss(loss);
        let input = Arranged::of(input);
        let target = input.beside(target);
        let mode = Mode::Train { last: true };
        let request = self.request(Use::Train, &input, &target).provided(traced.clone());
        let step = step::run(self, request, Ending::Commit, |this, context| {
            this.try_batch(input.batch(), target.batch(), &loss, context, mode)
        })?;
        self.learn_format(step.samples, step.time);
        Ok(step)
    }

    /// Runs forward and backward, and keeps the result for [`Pipeline::commit`]: a step over several
    /// mini-batches, which may differ in length.
    ///
    /// # Errors
    /// As [`Pipeline::backward`]; earlier mini-batches are kept.
    pub fn accumulate<X: Batch, Y: Batch + 'static, M: ModelOutput, R: IntoLoss>(
        &mut self,
        input: &X,
        target: &Y,
        loss: impl FnMut(M, &Y) -> R + Send + 'static,
    ) -> Result<R::Outputs> {
        let traced = check_no_gradients(input);
        let start = Instant::now();
        let is_first = self.state.window.is_none();
        let loss = with_loss(loss);
        let arranged = Arranged::of(input);
        let target = arranged.beside(target);
        let mode = Mode::Train { last: false };
        let request = self.request(Use::Train, &arranged, &target).provided(traced.clone());
        let step = step::run(self, request, Ending::Keep, |this, context| {
            this.try_batch(arranged.batch(), target.batch(), &loss, context, mode)
        })?;
        // The memory format changes from window to window, so the first mini-batch of each window measures the
        // speed of the window's format.
        if is_first {
            // A replica without a sample takes part too.
            self.learn_format(arranged.samples().map_or(0, |s| s.count()), start.elapsed());
        }
        Ok(step.outputs)
    }

    /// Commits the gradients of all mini-batches since the last commit, as if they were one.
    ///
    /// # Errors
    /// As [`MicroBatcher::commit`](crate::MicroBatcher::commit).
    pub fn commit(&mut self) -> Result<StepReport> {
        step::commit(self)
    }

    /// Computes the mini-batch's loss in evaluation mode, without gradients, and collects the closure's
    /// outputs.
    ///
    /// # Errors
    /// As [`Pipeline::backward`].
    pub fn evaluate<X: Batch, Y: Batch + 'static, M: ModelOutput, R: IntoLoss>(
        &mut self,
        input: &X,
        target: &Y,
        loss: impl FnMut(M, &Y) -> R + Send + 'static,
    ) -> Result<StepReport<R::Outputs>> {
        let loss = with_loss(loss);
        let input = Arranged::of(input);
        let target = input.beside(target);
        let request = self.request(Use::Evaluate, &input, &target);
        step::run(self, request, Ending::Commit, |this, context| {
            this.try_batch(input.batch(), target.batch(), &loss, context, Mode::Evaluate)
        })
    }

    /// Runs `f` on the model's output for every micro-batch, in evaluation mode and without gradients, and
    /// joins its results in sample order; in a world, on every rank of the pipeline. `|out| out` returns
    /// the outputs themselves.
    ///
    /// ```
    /// # use brimful::{Layers, MicroBatches, Pipeline};
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # let layers = Layers::new().add("linear", |p| nn::linear(p, 4, 3, Default::default()));
    /// # let mut pipe = Pipeline::builder(layers).micro_batches(MicroBatches::Count(2)).build()?;
    /// # let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
    /// let classes = pipe.map(&x, |out: Tensor| out.argmax(1, false))?;
    /// assert_eq!(classes.size(), [8]);
    /// # Ok::<(), brimful::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Pipeline::backward`].
    pub fn map<X: Batch, M: ModelOutput, O: Batch + 'static>(
        &mut self,
        input: &X,
        mut f: impl FnMut(M) -> O + Send + 'static,
    ) -> Result<O> {
        let shared = SharedLoss::new(move |values: Vec<Tensor>, (): &()| {
            Ok((None, f(M::from_tensors(values)?)))
        });
        let input = Arranged::of(input);
        let request = self.request(Use::Map, &input, &input.beside(&()));
        let step = step::run(self, request, Ending::Commit, |this, context| {
            this.try_batch(input.batch(), &(), &shared, context, Mode::Evaluate)
        })?;
        Ok(step.outputs)
    }

    /// Returns the request for a step with this mini-batch.
    pub(crate) fn request<'a>(
        &self,
        used: Use,
        arranged: &'a Arranged<'_, impl Batch>,
        target: &Arranged<'_, impl Batch>,
    ) -> StepRequest<'a> {
        let (input, sorted) = (arranged.batch(), target.samples().map(drop));
        let target = target.batch();
        let request = StepRequest::new(used, arranged);
        let fits = sorted.and_then(|()| check_common_len(input, target));
        let request = request.with(fits, batch::devices(target));
        // Ranks of one pipeline must pass equal mini-batches: compares dtypes, shapes and a hash of values.
        match self.ranks.of_pipeline().len() {
            1 => request,
            _ => request.with_hash(format!("{}; {}", described(input), described(target))),
        }
    }

    /// Runs one attempt at a mini-batch: every worker runs its actions, and the closure gets the outputs.
    fn try_batch<Y: Batch + 'static, O: Batch + 'static>(
        &mut self,
        input: &impl Batch,
        target: &Y,
        closure: &SharedLoss<Y, O>,
        context: AttemptContext<'_>,
        mode: Mode,
    ) -> Result<(PipelineAttempt, O), Failed> {
        let exchange = context.exchange;
        let samples = context.handshake.own();
        let plan = self.plan(&context, mode, false)?;
        let ranges = plan.portions.iter().flat_map(|portion| portion.ranges.iter().cloned());
        let inputs = inputs(input, ranges)?;
        let last = self.layout.last_worker();
        // Every rank makes the closure. A rank without the last stage never runs it, so any device will do.
        let device = |replica| match self.ranks.has(last) {
            true => self.device_of(replica, last).device,
            false => Device::Cpu,
        };
        let (closures, collected) = closure.for_each(target, &plan.portions, device)?;
        let attempt = self.attempt(&plan, inputs, closures, exchange)?;
        let outputs = match self.ranks.of_pipeline().len() {
            1 => joined(&collected, samples)
                .and_then(|own| Ok(own.or_else(O::blank).ok_or(BatchError::NothingToJoin)?)),
            _ => self.ranks.outputs(exchange, last, self.output_device(), &collected, samples),
        };
        match outputs {
            Ok(outputs) => Ok((attempt, outputs)),
            Err(error) => {
                attempt.undo(self)?;
                Err(error.into())
            }
        }
    }
}

/// Wraps the user's closure in the form in which the last stage calls it.
fn with_loss<Y: Batch + 'static, M: ModelOutput, R: IntoLoss>(
    mut loss: impl FnMut(M, &Y) -> R + Send + 'static,
) -> SharedLoss<Y, R::Outputs> {
    SharedLoss::new(move |values: Vec<Tensor>, target: &Y| {
        let (loss, outputs) = loss(M::from_tensors(values)?, target).into_parts()?;
        Ok((Some(loss), outputs))
    })
}

/// Fails if a tensor of the mini-batch requires a gradient, which would be lost.
pub(crate) fn check_no_gradients(batch: &impl Batch) -> Result<()> {
    let mut traced = Vec::new();
    batch.visit(&mut |leaf| traced.push(leaf.tensor().requires_grad()));
    match traced.into_iter().position(|traced| traced) {
        Some(leaf) => Err(PipelineError::InputGradient { leaf }.into()),
        None => Ok(()),
    }
}

/// Returns the tensors of each micro-batch, detached.
pub(crate) fn inputs(
    batch: &impl Batch,
    ranges: impl Iterator<Item = Range<usize>>,
) -> Result<Vec<Vec<Tensor>>> {
    let leaves = |range| {
        let slice = batch::slice(batch, range)?;
        Ok(batch::tensors(&slice).into_iter().map(Tensor::detach).collect())
    };
    ranges.map(leaves).collect()
}

/// Form in which a closure takes a model's output: a tensor, a `Vec` of tensors, an array or a tuple.
pub trait ModelOutput: Sized {
    /// Converts the model's output tensors.
    ///
    /// # Errors
    /// When `Self` holds a different number of tensors.
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self>;
}

impl ModelOutput for Vec<Tensor> {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        Ok(tensors)
    }
}

impl<const N: usize> ModelOutput for [Tensor; N] {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        let given = tensors.len();
        tensors.try_into().map_err(|_| PipelineError::OutputCount { given, taken: N }.into())
    }
}

impl ModelOutput for Tensor {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        <[Tensor; 1]>::from_tensors(tensors).map(|[only]| only)
    }
}

impl ModelOutput for (Tensor, Tensor) {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        <[Tensor; 2]>::from_tensors(tensors).map(Self::from)
    }
}

impl ModelOutput for (Tensor, Tensor, Tensor) {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        <[Tensor; 3]>::from_tensors(tensors).map(Self::from)
    }
}

/// Outputs of a closure, by micro-batch of each pipeline in this process.
pub(crate) type Collected<O> = Arc<Mutex<Vec<Option<O>>>>;

/// Caller's closure, which returns outputs, and a loss if there is one. Shared, because several attempts may need
/// it.
struct SharedLoss<Y, O>(Arc<Mutex<UserLoss<Y, O>>>);

type UserLoss<Y, O> = dyn FnMut(Vec<Tensor>, &Y) -> Result<(Option<Loss>, O)> + Send;

impl<Y: Batch + 'static, O: Batch + 'static> SharedLoss<Y, O> {
    fn new(
        loss: impl FnMut(Vec<Tensor>, &Y) -> Result<(Option<Loss>, O)> + Send + 'static,
    ) -> Self {
        Self(Arc::new(Mutex::new(loss)))
    }

    /// Returns a closure for the last stage of each pipeline, and the collection of the closures' outputs. A last
    /// stage calls its closure with the number of a micro-batch.
    fn for_each(
        &self,
        target: &Y,
        portions: &[Portion],
        device: impl Fn(usize) -> Device,
    ) -> Result<(Vec<LossFn>, Collected<O>)> {
        let count = portions.iter().map(|portion| portion.ranges.len()).sum();
        let collected: Collected<O> = Arc::new(Mutex::new((0..count).map(|_| None).collect()));
        let mut start = 0;
        let mut all = Vec::with_capacity(portions.len());
        for (replica, portion) in portions.iter().enumerate() {
            let given = (Arc::clone(&collected), start);
            all.push(self.on(target, &portion.ranges, device(replica), given)?);
            start += portion.ranges.len();
        }
        Ok((all, collected))
    }

    /// Returns the closure for one pipeline, which collects its outputs from index `start` on.
    fn on(
        &self,
        target: &Y,
        ranges: &[Range<usize>],
        device: Device,
        (collected, start): (Collected<O>, usize),
    ) -> Result<LossFn> {
        let slices = ranges.iter().map(|range| batch::slice(target, range.clone()));
        let targets = slices.collect::<Result<Vec<Y>>>()?;
        let loss = Arc::clone(&self.0);
        let mut lender = Lender::default();
        Ok(Box::new(move |i: usize, values: &[Tensor]| {
            // Moved only when needed: all targets together would fill the last stage's device.
            let target = feed::moved(&targets[i], device)?;
            let values = values.iter().map(Tensor::shallow_clone).collect();
            let mut loss = loss.lock().unwrap_or_else(PoisonError::into_inner);
            let target = lender.lend(target)?;
            let result = loss(values, &target);
            let (loss, output) = lender.take_back(result)?;
            // Detached, because it is kept until the step's end: its graph would keep the micro-batch's
            // activations.
            let output = batch::detached(&output)?;
            let mut all = collected.lock().unwrap_or_else(PoisonError::into_inner);
            all[start + i] = Some(output);
            Ok(loss)
        }))
    }
}

/// Joins the closure's outputs in sample order; none if the pipeline has no sample.
pub(crate) fn joined<O: Batch>(collected: &Collected<O>, samples: &Samples) -> Result<Option<O>> {
    let mut parts = collected.lock().unwrap_or_else(PoisonError::into_inner);
    match samples.join(parts.iter_mut().filter_map(Option::take).collect()) {
        Err(Error::Batch(BatchError::NothingToJoin)) => Ok(None),
        outputs => samples.restored(outputs?).map(Some),
    }
}

/// Fails if input and target differ in length; a target without a tensor to cut is allowed.
fn check_common_len(input: &impl Batch, target: &impl Batch) -> Result<()> {
    let input = batch::len(input)?;
    match batch::len(target) {
        Ok(target) if target != input => {
            Err(BatchError::LeafLengthsDiffer { lengths: vec![input, target] }.into())
        }
        Ok(_) | Err(Error::Batch(BatchError::NothingToCut)) => Ok(()),
        Err(error) => Err(error),
    }
}
