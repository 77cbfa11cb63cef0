//! Implements the step engine for pipelines: runs the workers' attempts at a mini-batch, and commits or
//! undoes them.

use std::sync::Arc;
use std::time::Instant;

use tch::{Device, Tensor};

use super::attempt::{AttemptPlan, PipelineAttempt, Portion, portions};
use super::{Pipeline, check_offloaded_graphs, ranks};
use crate::auto::Kind;
use crate::batch::{BatchError, Samples};
use crate::memory::Memory;
use crate::memory_format::FormatChoice;
use crate::pipeline::error::PipelineError;
use crate::pipeline::run::{End, Job, LossFn, Mode, WorkerFailure, wire};
use crate::pipeline::site::ActivationCache;
use crate::pipeline::transfers::Tensors;
use crate::pipeline::worker::{Idle, ReportOptions, Worker, WorkerDone};
use crate::statistics::Pending;
use crate::step::{
    self, Attempt, AttemptContext, BatchRole, Engine, Exchange, Failed, Figures, Handshake, Hints,
    Lesson, MicroBatches, NonFinitePolicy, PartReport, Seeding, StepState, Team, Timeline, Trained,
    Whole, gradient_bytes, names,
};
use crate::workers::{DeviceSpec, Workers};
use crate::{Error, Result, device};
use brimful_plan::schedule::Recompute;

impl Engine for Pipeline {
    type Attempt = PipelineAttempt;

    const SPREADS_MODEL: bool = true;

    fn state(&mut self) -> &mut StepState<PipelineAttempt> {
        &mut self.state
    }

    fn seeding(&self, _team: &Team) -> Seeding {
        Seeding::Step(self.seeded_devices())
    }

    fn begin(&mut self, devices: &[Device]) -> Result<bool> {
        // Workers drop an open forward when they begin another step, so `backward_from` must refuse it.
        self.open = None;
        let mut workers = self.workers();
        workers.involve(devices.iter().copied());
        match self.ranks.has_ties {
            true => ranks::have_changed(&workers),
            false => Ok(false),
        }
    }

    fn refresh_copies(&mut self) -> Result<()> {
        ranks::spread(&self.workers(), &self.ranks)
    }

    fn trained(&mut self) -> Result<Option<Trained>> {
        let here = self.workers().all(|worker| {
            Ok(Trained::of(&worker.parameters(), &names(&worker.store.variables_)))
        })?;
        Ok(Some(Trained::all(here.iter())))
    }

    fn largest_part(&self, samples: &Samples) -> Result<Samples> {
        let shares = samples.shares(self.ranks.replicas_here)?;
        let parts = shares.into_iter().map(|share| samples.part(&share));
        Ok(parts.max_by_key(Samples::units).unwrap_or_default())
    }

    fn memories(&mut self) -> Vec<Option<Memory>> {
        self.devices.iter().map(DeviceSpec::memory).collect()
    }

    fn floors(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        if !kind.is_training() {
            return Ok(vec![0; self.devices.len()]);
        }
        self.workers().all(|worker| Ok(gradient_bytes(&worker.store.variables_)))
    }

    fn named(&mut self) -> Result<Vec<(String, Tensor)>> {
        let stores =
            self.workers().all(|worker| Ok(names(&worker.store.variables_).into_list()))?;
        Ok(stores.into_iter().flatten().collect())
    }

    fn place(&self) -> String {
        let devices = device::names(self.seeded_devices());
        let Self { balance, schedule, recompute, .. } = self;
        format!("{devices} of {balance}, {schedule}, recomputing {recompute}")
    }

    fn hints(&mut self) -> Hints {
        let hold = self.format_choice.as_ref().is_some_and(FormatChoice::is_measuring);
        Hints { hold, ..Hints::default() }
    }

    fn free_memory(&mut self) -> Result<bool> {
        let made = self.workers().all(|worker| {
            Ok(worker.site.cache.as_mut().is_some_and(ActivationCache::free_memory))
        })?;
        Ok(made.contains(&true))
    }

    fn falls_back(&mut self, error: &Error) -> Result<bool> {
        // The workers convert the parameters as they begin.
        Ok(self.format_choice.as_mut().is_some_and(|choice| choice.fall_back(error)))
    }

    fn end_fallback(&mut self, works: bool) -> Result<()> {
        if let Some(choice) = &mut self.format_choice {
            choice.end_fallback(works);
        }
        Ok(())
    }

    fn failed(&mut self, error: Error) -> Error {
        let updated = self.workers().all(|worker| Ok(std::mem::take(&mut worker.updated)));
        match updated.map_or(0, |updated| updated.into_iter().sum()) {
            0 => error,
            stages => PipelineError::partly_updated(stages, &error).into(),
        }
    }
}

impl Attempt<Pipeline> for PipelineAttempt {
    fn report(&mut self, pipeline: &mut Pipeline, exchange: &Exchange) -> Result<Vec<PartReport>> {
        let others = exchange.team.replicas > 1;
        let mut reports = match self.reports.take() {
            Some(reports) => reports,
            None => pipeline.ask_all(self, others)?,
        };
        // All ranks computed the same loss on all outputs, so only rank 0 reports it.
        if let (Some((counted, groups)), 0) = (self.loss.take(), exchange.team.world.rank()) {
            reports[0].counted = counted;
            reports[0].groups = groups;
        }
        Ok(reports)
    }

    fn prepare(
        &mut self,
        pipeline: &mut Pipeline,
        whole: &Arc<Whole>,
        exchange: &Exchange,
    ) -> Result<()> {
        let workers = pipeline.workers();
        let ranks = &pipeline.ranks;
        let collectives =
            pipeline.numbers().map(|number| ranks.summing(&exchange.collective, number));
        let (whole, has_ties) = (Arc::clone(whole), ranks.has_ties);
        let outgoing =
            workers.each_or_error(collectives.collect(), move |worker, collective| {
                let outgoing = worker.sum_up(&whole, collective)?;
                if !has_ties {
                    worker.join_and_cast(Vec::new())?;
                }
                Ok(outgoing)
            })?;
        if has_ties {
            let arriving = ranks::gather(ranks, &exchange.collective, outgoing)?;
            workers.each_or_error(arriving, Worker::join_and_cast)?;
        }
        if pipeline.state.non_finite != NonFinitePolicy::RefuseGradients {
            return Ok(());
        }
        // Checked after the cast, because a sum may be finite where its cast is not.
        workers.all(|worker| worker.check_finite()).map(drop)
    }

    fn commit(&mut self, pipeline: &mut Pipeline) -> Result<()> {
        pipeline.workers().all(|worker| worker.commit()).map(drop)
    }

    fn undo(self, pipeline: &mut Pipeline) -> Result<()> {
        let undone = pipeline.workers().all(move |worker| {
            // `undo` does not touch a worker's accumulation window, because a failed mini-batch must not
            // take earlier ones with it. To undo the window, make it the current attempt first.
            if self.waits {
                worker.reopen();
            }
            worker.undo()
        });
        undone.map(drop)
    }

    fn detach(&mut self, pipeline: &mut Pipeline, _earlier: Option<&Self>) -> Result<()> {
        pipeline.workers().all(|worker| worker.detach()).map(drop)
    }

    fn merge(self, pipeline: &mut Pipeline, earlier: Option<Self>) -> Result<Self> {
        pipeline.workers().all(|worker| worker.keep())?;
        let Some(mut all) = earlier else { return Ok(Self { waits: true, ..self }) };
        all.actions = self.actions;
        all.sizes.extend(self.sizes);
        all.shares.iter_mut().zip(self.shares).for_each(|(all, later)| *all += later);
        all.needs.iter_mut().zip(self.needs).for_each(|(all, later)| *all = (*all).max(later));
        all.normalised |= self.normalised;
        all.unmanaged_norms = all.unmanaged_norms.max(self.unmanaged_norms);
        Ok(all)
    }

    fn check_trained(&self, pipeline: &mut Pipeline) -> Result<()> {
        pipeline.workers().all(|worker| worker.check_trained()).map(drop)
    }

    fn unit(&self) -> f64 {
        self.unit
    }

    fn lesson(&self) -> Lesson {
        Lesson {
            peaks: self.needs.clone(),
            sizes: self.sizes.clone(),
            normalised: self.normalised,
            captured: false,
        }
    }

    fn figures(&self, _pipeline: &mut Pipeline, whole: &Whole) -> Result<Figures> {
        let timeline = Timeline {
            actions: Arc::clone(&self.actions),
            spans: whole.spans.clone(),
            host_links: match whole
                .host_links
                .iter()
                .all(|host_link| host_link.transfers.is_empty())
            {
                true => Vec::new(),
                false => whole.host_links.clone(),
            },
        };
        Ok(Figures {
            shares: self.shares.clone(),
            sizes: self.sizes.clone(),
            times: Vec::new(),
            peaks: whole.peaks.clone(),
            replayed: 0,
            unmanaged_norms: self.unmanaged_norms,
            timeline: Some(timeline),
        })
    }
}

impl Pipeline {
    /// Plans the portions of this attempt, and the actions that run them; with two phases, all forwards
    /// come before the first backward.
    pub(crate) fn plan(
        &mut self,
        context: &AttemptContext<'_>,
        mode: Mode,
        two_phases: bool,
    ) -> Result<AttemptPlan> {
        let size = context.cut.size().ok_or(BatchError::NothingToCut)?;
        self.plan_for(context.handshake, size, mode, two_phases)
    }

    pub(crate) fn plan_for(
        &mut self,
        handshake: &Handshake,
        size: MicroBatches,
        mode: Mode,
        two_phases: bool,
    ) -> Result<AttemptPlan> {
        // An evaluation within an accumulation window is not part of the window, and has its own divisor (`unit`).
        let role = match mode.trains() {
            true => step::role(self, handshake, 0, mode.is_last()),
            false => BatchRole { last: mode.is_last(), ..handshake.role(0) },
        };
        let portions = portions(handshake, role, size, self.ranks.replicas_here)?;
        let mut actions = Vec::with_capacity(portions.len());
        for portion in &portions {
            // A list has at least one micro-batch: a pipeline without samples gets the shortest list, and
            // runs none of it.
            let listed = self.actions(portion.ranges.len().max(1))?;
            actions.push(match two_phases {
                // Offloaded stages return to the host between the phases, so all their micro-batches are
                // recomputed.
                true => {
                    let recompute = |stage| self.recompute_of(stage, Recompute::Always);
                    let listed = listed.in_two_phases(recompute)?;
                    check_offloaded_graphs(&listed, &self.locations, self.device_buffers)?;
                    Arc::new(listed)
                }
                false => listed,
            });
        }
        let seed = handshake.seed().unwrap_or_default();
        Ok(AttemptPlan { portions, mode, actions, unit: role.unit, seed })
    }

    /// Runs an attempt on every worker. `inputs` has an entry for each micro-batch, `closures` for each
    /// pipeline.
    pub(crate) fn attempt(
        &self,
        plan: &AttemptPlan,
        inputs: Vec<Vec<Tensor>>,
        closures: Vec<LossFn>,
        exchange: &Exchange,
    ) -> Result<PipelineAttempt, Failed> {
        let ends = closures.into_iter().map(End::Closure).collect();
        let jobs = self.jobs(plan, inputs, ends, exchange)?;
        let report_options = self.report_options(plan.mode.is_last(), exchange);
        let idle = Idle { trains: plan.mode.trains(), unit: plan.unit, report_options };
        let attempt = move |worker: &mut Worker, job| worker.attempt(job, report_options);
        Ok(attempt_of(plan, self.run_all(jobs, idle, exchange, attempt)?))
    }

    /// Runs all forwards; returns each worker's outputs, by micro-batch.
    pub(crate) fn attempt_forward(
        &self,
        plan: &AttemptPlan,
        inputs: Vec<Vec<Tensor>>,
        exchange: &Exchange,
    ) -> Result<Vec<WorkerDone>, Failed> {
        let ends = plan.portions.iter().map(|_| End::Gather).collect();
        let jobs = self.jobs(plan, inputs, ends, exchange)?;
        let report_options = ReportOptions { at_once: false, others: false };
        let idle = Idle { trains: true, unit: plan.unit, report_options };
        self.run_all(jobs, idle, exchange, Worker::attempt_forward)
    }

    /// Runs all backwards, from these gradients of the outputs, by micro-batch.
    pub(crate) fn attempt_backward(
        &self,
        plan: &AttemptPlan,
        mut gradients: Vec<Tensors>,
        exchange: &Exchange,
    ) -> Result<PipelineAttempt, Failed> {
        let mut jobs = Vec::new();
        for portion in &plan.portions {
            let rest = gradients.split_off(portion.ranges.len());
            let mut own = Some(std::mem::replace(&mut gradients, rest));
            for number in self.ranks.here() {
                let is_last = number == self.layout.last_worker();
                let rows = own.take_if(|_| is_last).unwrap_or_default();
                jobs.push((!portion.ranges.is_empty()).then_some(rows));
            }
        }
        let report_options = self.report_options(true, exchange);
        let idle = Idle { trains: true, unit: plan.unit, report_options };
        let attempt =
            move |worker: &mut Worker, rows| worker.attempt_backward(rows, report_options);
        Ok(attempt_of(plan, self.run_all(jobs, idle, exchange, attempt)?))
    }

    /// Returns how workers report. They report at once unless replicas of this process must first pool their
    /// statistics.
    fn report_options(&self, last: bool, exchange: &Exchange) -> ReportOptions {
        let at_once = last && self.ranks.replicas_here == 1;
        ReportOptions { at_once, others: exchange.team.replicas > 1 }
    }

    /// Runs each worker's job; workers without one take part as idle. If a worker fails, all workers undo.
    fn run_all<J: Send + 'static>(
        &self,
        jobs: Vec<Option<J>>,
        idle: Idle,
        exchange: &Exchange,
        f: impl Fn(&mut Worker, J) -> Result<WorkerDone, WorkerFailure> + Clone + Send + 'static,
    ) -> Result<Vec<WorkerDone>, Failed> {
        let collective = exchange.collective.clone();
        let workers = self.workers();
        let answers = workers.each(jobs, move |worker, job| {
            // Unless this worker succeeds, stops the workers that wait for it, in other ranks too.
            let stopping = collective.stopping();
            let done = match job {
                Some(job) => f(worker, job),
                None => worker.idle(idle),
            };
            if done.is_ok() {
                stopping.all_went_well();
            }
            // Wrapped in `Ok`: an error would get the time at which it is read, but a failure has its own
            // time.
            Ok(done)
        });
        let done = answers.map_err(Failed::from).and_then(first_failure);
        if done.is_err() {
            workers.all(|worker| worker.undo())?;
        }
        done
    }

    /// Collects the workers' reports on the attempt, or on the accumulation window.
    fn ask_all(&self, attempt: &mut PipelineAttempt, others: bool) -> Result<Vec<PartReport>> {
        let workers = self.workers();
        if attempt.waits {
            // A commit adds to gradients in place, but waiting updates still need the earlier values.
            workers.all(Worker::offload_all)?;
        }
        if std::mem::take(&mut attempt.waits) {
            workers.all(|worker| {
                worker.reopen();
                Ok(())
            })?;
        }
        self.gather_statistics(&workers)?;
        workers.all(move |worker| worker.tell(others))
    }

    /// Moves the layers' statistics from later replicas of this process to the first replica.
    fn gather_statistics(&self, workers: &Workers<Worker>) -> Result<()> {
        if self.ranks.replicas_here == 1 {
            return Ok(());
        }
        let stages = self.ranks.here().len();
        let owners = workers.all(|worker| {
            let owned = worker.variables.owned().filter(|variable| !variable.trainable);
            let named = owned.map(|v| (v.name.clone(), v.tensor.shallow_clone()));
            Ok(named.collect::<Vec<(String, Tensor)>>())
        })?;
        let twins = |at: usize| (at >= stages).then(|| ranks::shared(&owners[at % stages]));
        let jobs = (0..workers.len()).map(twins).collect();
        let seen = workers.each_or_error(jobs, |worker, twins| match twins {
            Some(twins) => worker.hand_statistics(&twins),
            None => Ok(None),
        })?;
        let mut arriving: Vec<Vec<Pending>> = (0..workers.len()).map(|_| Vec::new()).collect();
        for (at, seen) in seen.into_iter().enumerate() {
            arriving[at % stages].extend(seen);
        }
        workers.each_or_error(arriving, |worker, seen| worker.join_statistics(seen)).map(drop)
    }

    /// Returns the job of each worker of this process; none if its pipeline has no micro-batch.
    fn jobs(
        &self,
        plan: &AttemptPlan,
        mut inputs: Vec<Vec<Tensor>>,
        ends: Vec<End>,
        exchange: &Exchange,
    ) -> Result<Vec<Option<Job>>> {
        let mut all = Vec::new();
        for (replica, (portion, end)) in plan.portions.iter().zip(ends).enumerate() {
            let rest = inputs.split_off(portion.ranges.len());
            let own = std::mem::replace(&mut inputs, rest);
            if portion.ranges.is_empty() {
                all.extend(self.ranks.here().map(|_| None));
            } else {
                let jobs = self.jobs_of(replica, plan, own, end, exchange)?;
                all.extend(jobs.into_iter().map(Some));
            }
        }
        Ok(all)
    }

    /// Returns the jobs of one pipeline's workers.
    fn jobs_of(
        &self,
        replica: usize,
        plan: &AttemptPlan,
        inputs: Vec<Vec<Tensor>>,
        end: End,
        exchange: &Exchange,
    ) -> Result<Vec<Job>> {
        let Portion { first, weights, .. } = &plan.portions[replica];
        let actions = &plan.actions[replica];
        let start = Instant::now();
        let memory = |number: usize| self.device_of(replica, number).memory();
        let ports = wire(&self.layout, actions, &self.ranks, &exchange.collective, memory)?;
        let mut ports: Vec<_> = ports.into_iter().map(Some).collect();
        let mut inputs = Some(inputs);
        let mut end = Some(end);
        // An accumulation window sums its gradients at the commit: none of its mini-batches is known to be
        // the last.
        let sums = plan.mode == Mode::Train { last: true };
        let job = |number| Job {
            actions: Arc::clone(actions),
            ports: (self.layout.of_worker(number))
                // Moved, not shared: if a channel end had a second holder, it would stay open when its worker
                // fails, and the neighbours would wait.
                .filter_map(|(stage, _)| ports[stage.index()].take())
                .collect(),
            inputs: (inputs.take_if(|_| number == self.layout.first_worker())).unwrap_or_default(),
            end: (end.take_if(|_| number == self.layout.last_worker())).unwrap_or(End::Elsewhere),
            summing: self.ranks.summing(&exchange.collective, number).filter(|_| sums),
            first: *first,
            mode: plan.mode,
            seed: plan.seed,
            weights: Arc::clone(weights),
            channels_last: self.format_choice.as_ref().is_some_and(FormatChoice::is_channels_last),
            start,
            traces_transfers: self.traces_transfers,
        };
        Ok(self.ranks.here().map(job).collect())
    }

    /// Returns the numbers of this process's workers in their pipelines, in order.
    fn numbers(&self) -> impl Iterator<Item = usize> {
        let here = self.ranks.here();
        (0..self.ranks.replicas_here).flat_map(move |_| here.clone())
    }

    /// Returns the device of a worker of one of this process's pipelines.
    pub(crate) fn device_of(&self, replica: usize, number: usize) -> &DeviceSpec {
        let here = self.ranks.here();
        &self.devices[replica * here.len() + number - here.start]
    }
}

fn attempt_of(plan: &AttemptPlan, done: Vec<WorkerDone>) -> PipelineAttempt {
    // `done` is grouped by replica, and all replicas have the same number of workers.
    let workers = (done.len() / plan.portions.len().max(1)).max(1);
    let norms = |replica: &[WorkerDone]| replica.iter().map(|done| done.unmanaged_norms).sum();
    let ranges = plan.portions.iter().flat_map(|portion| &portion.ranges);
    PipelineAttempt {
        actions: Arc::clone(&plan.actions[0]),
        shares: plan.portions.iter().map(Portion::samples).collect(),
        sizes: ranges.map(ExactSizeIterator::len).collect(),
        unit: plan.unit,
        needs: done.iter().map(|done| done.needed).collect(),
        normalised: done.iter().any(|done| done.normalised),
        unmanaged_norms: done.chunks(workers).map(norms).max().unwrap_or(0),
        reports: done.into_iter().map(|done| done.report).collect(),
        loss: None,
        waits: false,
    }
}

/// Returns all answers, or the earliest failure, because later failures may be consequences of it.
fn first_failure(
    answers: Vec<Result<Result<WorkerDone, WorkerFailure>>>,
) -> Result<Vec<WorkerDone>, Failed> {
    let mut all = Vec::new();
    let mut first: Option<Failed> = None;
    let mut stopped = None;
    for (worker, answer) in answers.into_iter().enumerate() {
        match answer.unwrap_or_else(|error| Err(error.into())) {
            Ok(answer) => all.push(answer),
            Err(WorkerFailure::Failed { at, error }) => {
                if first.as_ref().is_none_or(|first| at < first.at) {
                    first = Some(Failed::at(at, error));
                }
            }
            // Another worker failed first, here or in another rank.
            Err(WorkerFailure::Stopped) => stopped = stopped.or(Some(worker)),
        }
    }
    match (first, stopped) {
        (Some(failed), _) => Err(failed),
        // Another rank failed. Its error replaces the `WorkerGone` in the vote.
        (None, Some(worker)) => Err(Failed::stopped(Error::WorkerGone { worker })),
        (None, None) => Ok(all),
    }
}
