//! State of one worker during a step, and the execution of its actions.

use std::collections::{HashMap, VecDeque};

use brimful_torch::grad_mode::GradMode;
use brimful_torch::split_backward::SplitBackward;
use tch::Tensor;

use super::barrier::Barriers;
use super::failure::{Stop, WorkerFailure, failure};
use super::intake::Intake;
use super::timeline::ActionClock;
use super::{End, Job};
use crate::Result;
use crate::accumulate::Accumulator;
use crate::batch::{Borrower, Versions};
use crate::loss::Term;
use crate::memory::Memory;
use crate::oom;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::{OffloadedStages, Visit};
use crate::pipeline::site::{ActivationCache, Boundary, HeldInput, Site};
use crate::pipeline::transfers::{StageTransfer, Tensors, TransferClock};
use crate::random::StepRng;
use crate::step::{NonFinitePolicy, Tally, TermGroup};
use brimful_plan::schedule::{Action, ActionKind, MicroBatchId, StageId, Transfer, TransferKind};

/// State of one worker during a step.
pub(crate) struct WorkerRun {
    pub(crate) job: Job,
    pub(super) list: Vec<Action>,
    /// Transfers between host and device that remain, in the order in which they start.
    pub(super) transfers: VecDeque<Transfer>,
    /// Index of the next action.
    pub(super) next: usize,
    /// Micro-batches between forward and backward, by stage and micro-batch.
    pub(super) kept: Vec<Vec<Option<HeldMicroBatch>>>,
    /// Inputs and output gradients that arrived before the action that needs them, indexed like `kept`.
    pub(super) arrived: Vec<Vec<Option<Entered>>>,
    pub(super) gradients: Vec<Vec<Option<Vec<Tensors>>>>,
    /// Number of times that a stage's input must still come back from the host.
    pub(super) returns: HashMap<(StageId, MicroBatchId), usize>,
    /// Split backwards whose input gradient (dX) is done, indexed like `kept`.
    pub(super) begun: Vec<Vec<Option<BegunBackward>>>,
    /// Barriers before stages that begin with an exact BatchNorm; none if there is no such stage, or in an evaluation.
    pub(super) barriers: Option<Barriers>,
    /// Gradient accumulator; none in an evaluation.
    pub(crate) accumulator: Option<Accumulator>,
    pub(crate) tally: Tally,
    /// Gathered outputs, by micro-batch.
    pub(crate) outputs: Vec<Vec<Tensor>>,
    /// Gradients of gathered outputs, by micro-batch.
    pub(crate) output_gradients: Vec<Tensors>,
    /// Largest gradient after each micro-batch's last backward, if non-finite gradients are refused.
    pub(crate) largest: Vec<Option<Tensor>>,
    /// The model's inputs; empty except on the first stage's worker.
    pub(crate) intake: Intake,
    pub(crate) timeline: ActionClock,
    /// Clock of the transfers between host and device.
    pub(crate) transfer_clock: TransferClock,
}

/// Weight-gradient part (dW) of a split backward, and the generation of the weights that its graph refers
/// to.
pub(super) type BegunBackward = (SplitBackward, Option<u64>);

/// A micro-batch inside a stage, between its forward and its backward.
pub(super) struct HeldMicroBatch {
    pub(super) input: HeldInput,
    /// Output of the forward or of the recomputation; none until R has run.
    pub(super) output: Option<Output>,
    /// Generation of the weights that the graph refers to: see [`Site::generation`].
    pub(super) generation: Option<u64>,
}

/// Input of a stage, with its copy on the host if it waited there.
pub(crate) type Entered = (Boundary, Option<Vec<StageTransfer>>);

/// Start of a backward: the stage's output, or the terms of the loss.
pub(crate) enum Output {
    Boundary(Boundary),
    Terms(Vec<Term>),
}

impl WorkerRun {
    pub(crate) fn new(
        mut job: Job,
        number: usize,
        site: &Site,
        memory: Option<&Memory>,
    ) -> Result<Self> {
        let mut list = job.actions.lists()[number].clone();
        list.retain(|action| job.mode.runs(action.kind));
        let transfers: VecDeque<Transfer> = site.transfers(&list)?.into();
        let mut returns = HashMap::new();
        for one in transfers.iter().filter(|one| one.kind == TransferKind::BoundaryIn) {
            if let Some(i) = one.micro_batch {
                *returns.entry((one.stage, i)).or_default() += 1;
            }
        }
        let m = job.actions.micro_batches();
        let device = site.device;
        let timeline = ActionClock::new(device, memory, job.start, list.len())?;
        let enters = |a: &&Action| a.kind == ActionKind::Forward && a.stage.index() == 0;
        // The first stage takes inputs in the order in which they are sent, so this is the list's order.
        let order = list.iter().filter(enters).map(|action| action.micro_batch.index());
        let inputs = std::mem::take(&mut job.inputs);
        let intake = Intake::new(inputs, order, &site.inputs)?;
        Ok(Self {
            kept: job.ports.iter().map(|_| row_of_none(m)).collect(),
            arrived: job.ports.iter().map(|_| row_of_none(m)).collect(),
            gradients: job.ports.iter().map(|_| row_of_none(m)).collect(),
            returns,
            begun: job.ports.iter().map(|_| row_of_none(m)).collect(),
            barriers: (job.mode.trains() && site.stages.iter().any(|s| s.exact_norm().is_some()))
                .then(|| Barriers::before(&site.stages, m)),
            outputs: (0..m).map(|_| Vec::new()).collect(),
            output_gradients: Vec::new(),
            tally: Tally::default(),
            largest: row_of_none(m),
            intake,
            next: 0,
            accumulator: None,
            transfer_clock: TransferClock::new(device, job.traces_transfers),
            timeline,
            list,
            transfers,
            job,
        })
    }

    /// Runs the next actions while they are of a wanted kind.
    pub(crate) fn execute(
        &mut self,
        site: &mut Site,
        wanted: impl Fn(ActionKind) -> bool,
    ) -> Result<(), WorkerFailure> {
        while let Some(&action) = self.list.get(self.next).filter(|action| wanted(action.kind)) {
            // A failure before the first layer must not name the previous action's layer.
            site.layer.set(None);
            let done = oom::catch(|| {
                self.start_transfers(site)?;
                // Advanced before the action runs, because a backward searches the list for later backwards.
                self.next += 1;
                let _graphs = GradMode::set(self.job.mode.trains());
                self.perform(site, action)
            });
            done.map_err(|caught| failure(site, action, caught))?;
        }
        let Some(&last) = self.list.last().filter(|_| self.next == self.list.len()) else {
            return Ok(());
        };
        // Transfers that follow the last action, such as its gradients' copy to the host.
        let done = oom::catch(|| self.start_transfers(site));
        done.map_err(|caught| failure(site, last, caught))
    }

    /// Returns the index of the action that completes the stage's gradients.
    pub(crate) fn last_backward(&self, stage: StageId) -> Option<usize> {
        self.list.iter().rposition(|action| action.stage == stage && action.kind.releases())
    }

    /// Fails if an update in the backward cannot run: the loss's denominator is not known yet, or the policy
    /// refuses a loss or gradient.
    fn check_update(&self, site: &Site) -> Result<()> {
        let Some(offloaded) = site.offloaded.as_ref().filter(|o| o.updates_in_backward()) else {
            return Ok(());
        };
        let groups = self.tally.groups(self.job.mode.is_last());
        if groups.iter().any(|group| *group != TermGroup::Done) {
            return Err(PipelineError::UnknownInBackward.into());
        }
        refuse_non_finite(&self.tally, &self.largest, offloaded, site.non_finite)
    }

    /// Updates parameters that stay on the device, if this action completes their gradients.
    fn update_resident(&mut self, site: &mut Site, at: usize, action: Action) -> Result<()> {
        let is_updated = site.offloaded.as_ref().is_some_and(|stages| stages.updates_resident(at));
        if !is_updated || self.last_backward(action.stage) != Some(self.next - 1) {
            return Ok(());
        }
        self.check_update(site)?;
        match (&mut site.offloaded, &mut self.accumulator) {
            (Some(offloaded), Some(accumulator)) => {
                offloaded.update_resident(at, accumulator, site.optimizer.as_mut())
            }
            _ => Ok(()),
        }
    }

    /// Starts the transfers that come before the next action.
    fn start_transfers(&mut self, site: &mut Site) -> Result<(), Stop> {
        while let Some(one) = self.transfers.front().filter(|one| one.before <= self.next).copied()
        {
            self.transfers.pop_front();
            let at = |stage| site.place_of(stage).expect("moves are of the worker's own stages");
            match (one.kind, one.micro_batch) {
                // The action that computed the tensors has started this transfer.
                (TransferKind::BoundaryOut | TransferKind::GradientOut, _) => {}
                (TransferKind::BoundaryIn, Some(i)) => {
                    let place = at(one.stage);
                    self.returns.entry((one.stage, i)).and_modify(|times| *times -= 1);
                    self.bring_in(site, place, i.index())?;
                }
                (TransferKind::GradientIn, Some(i)) => {
                    let (place, i) = (at(StageId(one.stage.0 - 1)), i.index());
                    self.gradients[place][i] = Some(self.receive_gradients(site, place, i)?);
                }
                _ => {
                    let place = at(one.stage);
                    self.transfer_weights(site, place, one)?;
                }
            }
        }
        Ok(())
    }

    /// Starts to transfer a stage's weights, or its gradients.
    fn transfer_weights(&mut self, site: &mut Site, at: usize, one: Transfer) -> Result<()> {
        if one.kind == TransferKind::OffloadGradients {
            self.check_update(site)?;
        }
        let Some(offloaded) = &mut site.offloaded else { return Ok(()) };
        match one.kind {
            TransferKind::Fetch => {
                let is_fetch = |one: &&Transfer| one.kind == TransferKind::Fetch;
                let following = self.transfers.iter().filter(is_fetch).count();
                let visit = Visit {
                    completes: one.completes_gradients(&self.transfers),
                    ends_step: following < offloaded.device_buffers(),
                };
                offloaded.fetch(at, one, visit, &mut self.transfer_clock)
            }
            TransferKind::Release => {
                let of_weights = |one: &Transfer| {
                    matches!(one.kind, TransferKind::Fetch | TransferKind::Release)
                };
                // Without an optimizer of this library, the user's code may update the weights on the host
                // unnoticed, so no copy is left on the device.
                let is_last = !self.transfers.iter().any(of_weights) && site.optimizer.is_some();
                match is_last && self.accumulator.is_some() {
                    true => offloaded.release_last(at)?,
                    false => offloaded.release(at)?,
                }
                self.transfer_clock.release(one)
            }
            _ => {
                let accumulator = self.accumulator.as_mut();
                let accumulator = accumulator.expect("training has an accumulator");
                let optimizer = site.optimizer.as_mut();
                offloaded.take_gradients(at, accumulator, one, optimizer, &mut self.transfer_clock)
            }
        }
    }

    fn perform(&mut self, site: &mut Site, action: Action) -> Result<(), Stop> {
        let at = site.place_of(action.stage).expect("a worker's list is of its own stages");
        if let Some(offloaded) = &mut site.offloaded {
            let Action { stage, .. } = action;
            let late = Transfer {
                kind: TransferKind::Fetch,
                stage,
                micro_batch: None,
                before: self.next - 1,
            };
            offloaded.enter(at, late, site.optimizer.as_mut(), &mut self.transfer_clock)?;
        }
        site.look_for_free_memory(&mut self.transfer_clock)?;
        match action.kind {
            ActionKind::Forward => self.forward(site, at, action)?,
            ActionKind::Recompute => self.recompute(site, at, action)?,
            ActionKind::Backward | ActionKind::InputGradient => self.backward(site, at, action)?,
            ActionKind::WeightGradient => self.weight_gradient(site, at, action)?,
        }
        Ok(self.update_resident(site, at, action)?)
    }

    fn forward(&mut self, site: &mut Site, at: usize, action: Action) -> Result<(), Stop> {
        let i = action.micro_batch.index();
        let (input, staged) = self.receive(site, at, i)?;
        if let Some(waiting) = &mut site.cache {
            waiting.note(&input);
        }
        self.timeline.begin()?;
        let input = self.held(site, at, input)?;
        let output = if !self.job.mode.trains() {
            let output = self.run_lent(site, at, i, input)?;
            return self.hand_on(site, at, action, output, |_| false).map(drop);
        } else if self.keeps_activations(site, action) {
            let output = self.run_lent(site, at, i, input.share())?;
            Some(self.hand_on(site, at, action, output, Tensor::requires_grad)?)
        } else if self.ends_in_closure(at) {
            // No stage needs this result: the loss is computed during the recomputation.
            self.timeline.end(action)?;
            None
        } else {
            let output = self.run_for_now(site, at, i, &input)?;
            // This forward has no graph, so `requires_grad` says nothing; the recomputation's output will have a
            // graph.
            let traced = input.all().any(Tensor::requires_grad) || site.trains;
            let traced = |value: &Tensor| traced && value.is_floating_point();
            self.hand_on(site, at, action, output, traced)?;
            None
        };
        let input = match output {
            // The output's graph refers to the input.
            Some(_) => HeldInput::Here(input),
            // The mini-batch itself takes no further device memory.
            None if self.is_lent(at) => HeldInput::Here(input),
            None if !self.comes_back(action) && site.keeps_inputs() => HeldInput::Here(input),
            None => match staged {
                Some(transfers) => HeldInput::Host(transfers),
                None => {
                    let outgoing =
                        self.boundary_transfer(TransferKind::BoundaryOut, action.stage, i);
                    site.stage_input(input, outgoing, &mut self.transfer_clock)?
                }
            },
        };
        let generation = site.generation(at);
        self.kept[at][i] = Some(HeldMicroBatch { input, output, generation });
        Ok(())
    }

    /// Returns whether the forward's activations are kept for its backward.
    fn keeps_activations(&self, site: &Site, action: Action) -> bool {
        !self.job.actions.is_recomputed(action.stage, action.micro_batch)
            || site.cache.as_ref().is_some_and(ActivationCache::keeps_activations)
    }

    /// Runs a stage; if its input is the mini-batch's own memory, checks that no layer changed it.
    fn run_lent(&self, site: &Site, at: usize, i: usize, input: Boundary) -> Result<Boundary> {
        let trains = self.job.mode.trains();
        if !self.is_lent(at) {
            return Ok(site.run(at, input, self.rng(i), trains));
        }
        // A layer that writes into its input would change the user's mini-batch, so a retry would see changed data.
        let lent = input.share();
        let before = Versions::of(lent.all());
        let output = site.run(at, input, self.rng(i), trains);
        before.check(lent.all())?;
        site.inputs.borrowers.trust(Borrower::of_type::<Intake>());
        Ok(output)
    }

    /// Runs a stage without a graph, from an input that its recomputation will use again.
    fn run_for_now(&self, site: &Site, at: usize, i: usize, input: &Boundary) -> Result<Boundary> {
        let _without = tch::no_grad_guard();
        let before = Versions::of(input.all());
        let output = self.run_lent(site, at, i, input.share())?;
        match before.changed(input.all()) {
            Some(_) => Err(PipelineError::InputChanged.into()),
            None => Ok(output),
        }
    }

    fn recompute(&mut self, site: &mut Site, at: usize, action: Action) -> Result<()> {
        let i = action.micro_batch.index();
        let kept = self.kept[at][i].take().expect("a recompute comes after its forward");
        if kept.output.is_some() {
            // The forward kept its activations.
            self.kept[at][i] = Some(kept);
            return Ok(());
        }
        let held = match kept.input {
            HeldInput::Here(input) => input,
            // The activation cache moved the input to the host, outside the planned transfers.
            HeldInput::Host(transfers) => self.bring_back(site, at, i, &transfers)?,
        };
        self.timeline.begin()?;
        let held = self.held(site, at, held)?;
        let input = held.share();
        // With a closure at the end the forward was skipped: this is the first run, and statistics count
        // it.
        let output = if self.ends_in_closure(at) {
            let output = self.run_lent(site, at, i, input)?;
            Output::Terms(self.loss(site, i, &output.values)?)
        } else {
            Output::Boundary(site.run_again(at, input, self.rng(i))?)
        };
        let input = HeldInput::Here(held);
        let (output, generation) = (Some(output), site.generation(at));
        self.kept[at][i] = Some(HeldMicroBatch { input, output, generation });
        self.timeline.end(action)
    }

    /// Adds the normalising statistics to a stage's input, if there is a barrier before the stage.
    fn held(&mut self, site: &Site, at: usize, input: Boundary) -> Result<Boundary> {
        match &mut self.barriers {
            Some(barriers) => barriers.hold(site, at, input),
            None => Ok(input),
        }
    }

    fn rng(&self, i: usize) -> StepRng {
        StepRng::new(self.job.seed, self.job.first + i)
    }

    /// Computes the micro-batch's loss, counts it, and returns its terms; none if the closure returns no
    /// loss.
    pub(crate) fn loss(&mut self, site: &Site, i: usize, values: &[Tensor]) -> Result<Vec<Term>> {
        let seed = self.rng(i).seed(site.layout.layers.len());
        let End::Closure(closure) = &mut self.job.end else { unreachable!("asked for before") };
        // Holds the generator's lock from seeding to drawing: stages on one accelerator share a generator.
        let _alone = site.lock_device();
        site.generator.seed(seed);
        let Some(loss) = closure(i, values)? else { return Ok(Vec::new()) };
        let terms = loss.into_terms(self.job.mode.trains())?;
        self.tally.count(&terms, &self.job.weights[i])?;
        Ok(terms)
    }

    /// Returns whether the action's input will come back from the host.
    fn comes_back(&self, action: Action) -> bool {
        self.returns.get(&(action.stage, action.micro_batch)).is_some_and(|times| *times > 0)
    }

    /// Returns whether the stage's input is the mini-batch's own memory.
    fn is_lent(&self, at: usize) -> bool {
        self.job.ports[at].values_in.is_none() && self.intake.lends()
    }

    pub(crate) fn is_last(&self, at: usize) -> bool {
        self.job.ports[at].values_out.is_none()
    }

    pub(crate) fn ends_in_closure(&self, at: usize) -> bool {
        self.is_last(at) && matches!(self.job.end, End::Closure(_))
    }
}

/// Returns an empty entry for each micro-batch.
fn row_of_none<T>(micro_batches: usize) -> Vec<Option<T>> {
    (0..micro_batches).map(|_| None).collect()
}

/// Refuses non-finite losses and gradients before the optimizer updates by them. All losses are known when
/// the first stage's gradients are complete.
fn refuse_non_finite(
    tally: &Tally,
    largest: &[Option<Tensor>],
    offloaded: &OffloadedStages,
    policy: NonFinitePolicy,
) -> Result<()> {
    // Reads the losses only once, because every read waits for the device.
    if offloaded.updated_stages() == 0 && policy != NonFinitePolicy::Allow {
        tally.read(policy)?;
    }
    let mut of_gradients = Tally::default();
    for gradient in largest.iter().flatten() {
        of_gradients.add_largest(Some(gradient.shallow_clone()))?;
    }
    of_gradients.read(policy).map(drop)
}
