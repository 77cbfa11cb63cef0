//! Computes losses over the whole mini-batch: all forwards, the caller's loss, all backwards.

use std::ops::{Deref, Range};
use std::time::Instant;

use brimful_torch::autograd::backward_to;
use brimful_torch::grad_mode::GradMode;
use brimful_torch::leaves::{KnownLeaves, Reach};
use tch::Tensor;

use super::{check_no_gradients, inputs};
use crate::auto::Use;
use crate::batch::{Arranged, Batch, Samples};
use crate::pipeline::Pipeline;
use crate::pipeline::attempt::{AttemptPlan, OpenForward, PipelineAttempt};
use crate::pipeline::error::PipelineError;
use crate::pipeline::run::Mode;
use crate::pipeline::transfers::Tensors;
use crate::pipeline::worker::WorkerDone;
use crate::random::{of_accelerators, preserving, with_step_seed};
use crate::step::{
    self, AttemptContext, Counted, Ending, Engine, Exchange, Failed, RowGradients, StepError,
    StepReport, Tally, TermGroup, as_leaves,
};
use crate::{Error, Result, oom};

/// Model outputs for a whole mini-batch, in sample order and on the last stage's device.
///
/// The outputs begin a new graph: compute a loss from them, call the loss's `backward`, and pass the outputs to
/// [`Pipeline::backward_from`]. With a model of one output, `Outputs` dereferences to that tensor.
#[derive(Debug)]
pub struct Outputs {
    tensors: Vec<Tensor>,
    /// Leaves of the graph, in the order in which samples run: gradients arrive here.
    run: Vec<Tensor>,
    /// Number of the forward that made the outputs.
    number: u64,
}

impl Outputs {
    /// Returns all outputs.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
}

impl Deref for Outputs {
    type Target = Tensor;

    /// Returns the first output.
    fn deref(&self) -> &Tensor {
        &self.tensors[0]
    }
}

impl Pipeline {
    /// Runs forward in training, and keeps what [`Pipeline::backward_from`] needs.
    ///
    /// All forwards come before the first backward, so every stage holds the activations of all micro-batches, as
    /// with GPipe. With recomputation, a stage holds only its inputs. To compute outputs without training, use
    /// [`Pipeline::map`].
    ///
    /// ```
    /// # use brimful::{Layers, MicroBatches, Pipeline};
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # let layers = Layers::new().add("linear", |p| nn::linear(p, 4, 4, Default::default()));
    /// # let mut pipe = Pipeline::builder(layers).micro_batches(MicroBatches::Count(4)).build()?;
    /// # let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
    /// let out = pipe.forward(&x)?;
    /// let likeness = out.matmul(&out.tr()); // every sample with every other
    /// likeness.square().mean(Kind::Float).backward();
    /// pipe.backward_from(out)?;
    /// # Ok::<(), brimful::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the size is automatic, which needs a step that can be retried: use
    /// [`Pipeline::backward_whole`]; and as [`Pipeline::backward`].
    pub fn forward(&mut self, input: &impl Batch) -> Result<Outputs> {
        let start = Instant::now();
        let team = self.state.team.clone();
        let is_given = match self.state.size.is_automatic() {
            true => Err(PipelineError::AutomaticForward.into()),
            false => Ok(()),
        };
        let may = step::check_no_window(self).and(check_no_gradients(input)).and(is_given);
        let input = Arranged::of(input);
        let request = self.request(Use::TrainWhole, &input, &input.beside(&())).provided(may);
        let devices = self.seeded_devices();
        with_step_seed(devices, |seed| {
            let handshake = step::open(self, &team, &request, seed.map(Some))?;
            let mode = Mode::Train { last: true };
            let exchange = team.exchange()?;
            let plan = self.plan_for(&handshake, self.state.size, mode, true).map_err(Failed::from);
            let run = plan.and_then(|plan| {
                let ran = self.all_forwards(input.batch(), &plan, &exchange, handshake.own())?;
                Ok((plan, ran))
            });
            let (plan, (run, rows)) =
                run.map_err(|failed| exchange.report_failure(failed, start))?;
            let mut tensors = Vec::new();
            let restored = self.restored(&run, handshake.own()).map(|all| tensors = all);
            // If another rank failed, its gradients will never come: drop the graphs now.
            if let Err(error) = exchange.report(restored, start) {
                self.workers().all(|worker| worker.undo())?;
                return Err(error);
            }
            self.forwards += 1;
            let number = self.forwards;
            self.open = Some(OpenForward { number, plan, rows, exchange, handshake, start });
            Ok(Outputs { tensors, run, number })
        })
    }

    /// Runs backward from the outputs' gradients, and adds to the parameters' gradients what the plain
    /// model would have added. The step's loss, which the pipeline does not know, is NaN.
    ///
    /// # Errors
    /// When the outputs are not of the last forward or have no gradient; and as
    /// [`Pipeline::backward`].
    pub fn backward_from(&mut self, outputs: Outputs) -> Result<StepReport> {
        let is_open = |open: &OpenForward| open.number == outputs.number;
        let devices = self.seeded_devices();
        let before = self.ranks.all_or_none("backward_from", || {
            match self.open.as_ref().is_some_and(is_open) {
                true => of_accelerators(devices),
                false => Err(PipelineError::OldOutputs.into()),
            }
        })?;
        let open = self.open.take().ok_or(PipelineError::OldOutputs)?;
        let OpenForward { plan, rows, exchange, handshake, start, .. } = open;
        let gradients = RowGradients::of(&outputs.run);
        // Needs no new seed: recomputation draws from the forward's seed, which the workers' runs keep.
        preserving(before, || {
            let run = self.all_backwards(&plan, &gradients, &rows, &exchange);
            let attempt = run.map_err(|failed| exchange.report_failure(failed, start));
            let step =
                attempt.and_then(|attempt| step::finish(self, attempt, (), &exchange, start));
            let step = step.map_err(|error| self.failed(error))?;
            Ok(StepReport { loss: f64::NAN, seed: handshake.seed(), ..step })
        })
    }

    /// Runs forward, any loss on the outputs of the whole mini-batch, and backward, as one step: if memory
    /// runs out in any of them, an automatic size retries with smaller micro-batches.
    ///
    /// Only the stages get gradients. A loss is refused if it depends on other tensors that require a gradient
    /// ([`Error::OtherLeaf`]): use [`Pipeline::forward`] and [`Pipeline::backward_from`] instead. In a world,
    /// the loss gets the outputs of all replicas, on every rank.
    ///
    /// ```
    /// # use brimful::{Layers, Pipeline, MicroBatches};
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # let layers = Layers::new().add("linear", |p| nn::linear(p, 4, 4, Default::default()));
    /// # let mut pipe = Pipeline::builder(layers).micro_batches(MicroBatches::Auto).build()?;
    /// # let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
    /// let step = pipe.backward_whole(&x, |out| out.matmul(&out.tr()).square().mean(Kind::Float))?;
    /// assert!(step.loss.is_finite());
    /// # Ok::<(), brimful::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Pipeline::backward`].
    pub fn backward_whole(
        &mut self,
        input: &impl Batch,
        mut loss: impl FnMut(&Outputs) -> Tensor,
    ) -> Result<StepReport<Outputs>> {
        let traced = check_no_gradients(input);
        let input = Arranged::of(input);
        let request = self.request(Use::TrainWhole, &input, &input.beside(&())).provided(traced);
        step::run(self, request, Ending::Commit, |this, context| {
            this.try_whole(input.batch(), context, &mut loss)
        })
    }

    fn try_whole(
        &mut self,
        input: &impl Batch,
        context: AttemptContext<'_>,
        loss: &mut impl FnMut(&Outputs) -> Tensor,
    ) -> Result<(PipelineAttempt, Outputs), Failed> {
        let exchange = context.exchange;
        let plan = self.plan(&context, Mode::Train { last: true }, true)?;
        let samples = context.handshake.own();
        let (run, rows) = self.all_forwards(input, &plan, exchange, samples)?;
        let counted = || {
            let tensors = self.restored(&run, samples)?;
            // The numbers of forwards start at 1: `backward_from` refuses these outputs, whose backward
            // runs here.
            let outputs = Outputs { tensors, run, number: 0 };
            Ok::<_, Error>((self.loss_of(&outputs, loss)?, outputs))
        };
        let graphs = GradMode::set(true);
        let counted = oom::catch(counted);
        drop(graphs);
        let ((counted, gradients), outputs) = counted.map_err(|caught| self.given_up(caught))?;
        let mut attempt = self.all_backwards(&plan, &gradients, &rows, exchange)?;
        attempt.loss = Some(counted);
        // Detached: leaves would keep their gradients, as large as the outputs, as long as the caller has
        // them.
        let tensors = outputs.tensors.iter().map(Tensor::f_detach).collect::<Result<_, _>>();
        let tensors = tensors.map_err(Error::from)?;
        Ok((attempt, Outputs { tensors, run: Vec::new(), ..outputs }))
    }

    /// Runs all forwards; returns all outputs, as leaves, and the range of this process's rows.
    fn all_forwards(
        &self,
        input: &impl Batch,
        plan: &AttemptPlan,
        exchange: &Exchange,
        samples: &Samples,
    ) -> Result<(Vec<Tensor>, Range<usize>), Failed> {
        let ranges = plan.portions.iter().flat_map(|portion| portion.ranges.iter().cloned());
        let done = self.attempt_forward(plan, inputs(input, ranges)?, exchange)?;
        let own = done.into_iter().flat_map(|WorkerDone { outputs, .. }| outputs);
        let own = own.filter(|tensors| !tensors.is_empty()).collect();
        let (last, device) = (self.layout.last_worker(), self.output_device());
        let gathered = self.ranks.model_outputs(exchange, last, device, own, samples);
        let leaves = gathered.and_then(|(outputs, rows)| Ok((as_leaves(&outputs)?, rows)));
        leaves.map_err(|error| self.given_up(error))
    }

    /// Undoes all workers' runs after this failure; returns the failure, or the error of the undo.
    fn given_up(&self, cause: impl Into<Failed>) -> Failed {
        match self.workers().all(|worker| worker.undo()) {
            Ok(_) => cause.into(),
            Err(error) => error.into(),
        }
    }

    /// Computes and counts the loss, and computes the loss's gradient for each output.
    fn loss_of(
        &self,
        outputs: &Outputs,
        loss: &mut impl FnMut(&Outputs) -> Tensor,
    ) -> Result<((Counted, Vec<TermGroup>), RowGradients)> {
        let (tally, loss) = Tally::of_whole(loss(outputs))?;
        // Read before the backward, so that a refused loss skips the backward.
        let counted = tally.read(self.state.non_finite)?;
        // Computes gradients only for the outputs: any other tensor would keep its gradient if the step failed
        // later.
        let ends: Vec<&Tensor> = outputs.run.iter().collect();
        match backward_to(&KnownLeaves::new(&[])?, &ends, &[&loss], &[None], false)? {
            Reach::Known(()) => Ok(((counted, tally.groups(true)), RowGradients::of(&outputs.run))),
            Reach::Other(leaf) => Err(Error::OtherLeaf { shape: leaf.size() }),
        }
    }

    /// Returns the outputs in the user's order.
    fn restored(&self, run: &[Tensor], samples: &Samples) -> Result<Vec<Tensor>> {
        // The orders of other ranks' sequences are not known here.
        if samples.lengths().is_some() && !self.ranks.is_alone() {
            return Err(StepError::NotOverRanks { ranks: self.ranks.world().size() }.into());
        }
        samples.restored(run.iter().map(Tensor::shallow_clone).collect())
    }

    /// Runs all backwards, from this process's rows of the outputs' gradients.
    fn all_backwards(
        &self,
        plan: &AttemptPlan,
        gradients: &RowGradients,
        rows: &Range<usize>,
        exchange: &Exchange,
    ) -> Result<PipelineAttempt, Failed> {
        let cut = match gradients.is_empty() {
            true => Err(PipelineError::NoOutputGradient.into()),
            false => cut(gradients, plan, rows.start),
        };
        self.attempt_backward(plan, cut.map_err(|error| self.given_up(error))?, exchange)
    }
}

/// Cuts the outputs' gradients into each micro-batch's rows; the rows of this process begin at `start`.
fn cut(gradients: &RowGradients, plan: &AttemptPlan, start: usize) -> Result<Vec<Tensors>> {
    let ranges = plan.portions.iter().flat_map(|portion| &portion.ranges);
    let rows = ranges.map(|range| {
        let rows = gradients.rows(&(start + range.start..start + range.end))?;
        Ok(vec![rows.into_tensors()])
    });
    rows.collect()
}
