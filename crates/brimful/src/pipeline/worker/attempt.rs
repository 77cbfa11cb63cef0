//! Runs one worker's attempt at a step, and keeps the state to commit or undo it.

use std::collections::{BTreeMap, HashMap};

use tch::Tensor;

use super::Worker;
use crate::accumulate::{Accumulator, Sums};
use crate::oom::into_error;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::OffloadedStages;
use crate::pipeline::run::{Job, Mode, WorkerFailure, WorkerRun};
use crate::pipeline::site::StepExtent;
use crate::pipeline::transfers::Tensors;
use crate::random::Randomness;
use crate::statistics::Collecting;
use crate::step::{PartReport, StoreAttempt, Tally, Undo};
use crate::{Result, oom};
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::ActionKind;

/// Result of a worker's part of a step; the worker keeps the state to commit or undo it.
#[derive(Debug, Default)]
pub(crate) struct WorkerDone {
    /// Report of the part, if the worker reports as soon as it has run.
    pub(crate) report: Option<PartReport>,
    /// Gathered outputs, by micro-batch.
    pub(crate) outputs: Vec<Vec<Tensor>>,
    /// Memory that the part needed, without activations that could have waited on the host.
    pub(crate) needed: Option<Bytes>,
    /// Whether layers of this library normalised each micro-batch by itself.
    pub(crate) normalised: bool,
    /// Number of BatchNorm layers in the worker's stages that are not this library's.
    pub(crate) unmanaged_norms: usize,
}

/// Report settings: whether a worker reports its part as soon as it has run, and whether other replicas need
/// the report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReportOptions {
    pub(crate) at_once: bool,
    pub(crate) others: bool,
}

/// A step in which this worker's pipeline has no micro-batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Idle {
    pub(crate) trains: bool,
    /// Divisor of the other pipelines' gradients until the commit.
    pub(crate) unit: f64,
    pub(crate) report_options: ReportOptions,
}

/// Running statistics outside the step's control, each with a copy of its earlier value.
type Unmanaged = Vec<(Tensor, Tensor)>;

impl Worker {
    /// Runs a whole mini-batch, and keeps the state to commit or undo it.
    pub(crate) fn attempt(
        &mut self,
        job: Job,
        report_options: ReportOptions,
    ) -> Result<WorkerDone, WorkerFailure> {
        // Set on this thread, because each thread has its own grad mode.
        let _without = (!job.mode.trains()).then(tch::no_grad_guard);
        let (mut run, unmanaged) = self.begin(job)?;
        if run.job.mode.trains() {
            self.begin_gradients(&mut run)?;
        }
        let mode = run.job.mode;
        let (run, undo) = self.collecting(run, unmanaged, |kind| mode.runs(kind))?;
        self.conclude(run, undo, report_options)
    }

    /// Runs the forwards of a step whose loss is not known yet.
    pub(crate) fn attempt_forward(&mut self, job: Job) -> Result<WorkerDone, WorkerFailure> {
        let (run, unmanaged) = self.begin(job)?;
        let (mut run, undo) = self.collecting(run, unmanaged, is_forward)?;
        let outputs = std::mem::take(&mut run.outputs);
        self.open = Some((run, undo));
        Ok(WorkerDone { outputs, ..WorkerDone::default() })
    }

    /// Runs the backwards of the step that `attempt_forward` began, from the gradients of each micro-batch's
    /// outputs.
    pub(crate) fn attempt_backward(
        &mut self,
        gradients: Vec<Tensors>,
        report_options: ReportOptions,
    ) -> Result<WorkerDone, WorkerFailure> {
        let (mut run, undo) = self.open.take().expect("the pipeline knows that one is open");
        run.output_gradients = gradients;
        // Begun only now, because the caller may change gradients and parameters between forward and backward.
        let begun = self.begin_gradients(&mut run).map_err(WorkerFailure::from);
        let result = begun.and_then(|()| self.go_on(run, |_| true));
        let (run, undo) = or_undo(result, undo)?;
        self.conclude(run, undo, report_options)
    }

    /// Takes part in a step in which only other pipelines have micro-batches.
    pub(crate) fn idle(&mut self, idle: Idle) -> Result<WorkerDone, WorkerFailure> {
        let Idle { trains, unit, report_options } = idle;
        self.undo()?;
        self.offload_all()?;
        let nothing = (Sums::none(self.site.offloaded.is_some()), Tally::default(), Vec::new());
        // Trained parameters are compared with those of the other pipelines, which train none in an
        // evaluation.
        let parameters = if trains { self.parameters() } else { Vec::new() };
        let variables = &self.store.variables_;
        let undo = Undo::default();
        // An attempt without gradients, instead of none, takes part in votes and sums like any other, and
        // divides the summed gradients by the same numbers.
        self.attempt =
            Some(StoreAttempt::new(parameters, variables, nothing, undo, unit, Vec::new()));
        (self.spans, self.host_link) = Default::default();
        Ok(self.done(Vec::new(), report_options)?)
    }

    fn begin(&mut self, job: Job) -> Result<(WorkerRun, Unmanaged)> {
        // A forward without its backward still holds its graphs, which would count in this run's peak.
        self.undo()?;
        self.convert(job.channels_last)?;
        if let Some(memory) = &self.memory {
            memory.reset_peak()?;
        }
        if let Some(waiting) = &mut self.site.cache {
            let samples = || job.weights.iter().map(|weight| weight.samples as u64);
            let largest_micro_batch = samples().max().unwrap_or(0);
            let extent = StepExtent { largest_micro_batch, mini_batch: samples().sum() };
            waiting.begin(job.mode.trains(), extent)?;
        }
        self.site.trains = self.variables.trained().next().is_some();
        if !job.mode.trains() {
            return Ok((self.run_of(job)?, Vec::new()));
        }
        let unmanaged = self.unmanaged.save(&self.store.variables_)?;
        self.site.unmanaged = unmanaged.iter().map(|(running, _)| running.data()).collect();
        Ok((self.run_of(job)?, unmanaged))
    }

    fn run_of(&self, job: Job) -> Result<WorkerRun> {
        let mut run = WorkerRun::new(job, self.number, &self.site, self.memory.as_ref())?;
        // The loss continues the count of the accumulation window's earlier mini-batches.
        run.tally = self.window.as_ref().map(|window| window.tally.following()).unwrap_or_default();
        Ok(run)
    }

    /// Makes the accumulator of the run's gradients, and begins updates in the backward if they are enabled.
    fn begin_gradients(&mut self, run: &mut WorkerRun) -> Result<()> {
        run.accumulator = Some(self.accumulator(run)?);
        self.begin_updates(run)
    }

    /// Makes the accumulator of the run's gradients, apart from existing ones.
    fn accumulator(&mut self, run: &WorkerRun) -> Result<Accumulator> {
        let mut accumulator = Accumulator::begin(self.parameters(), &self.store.variables_)?;
        match &mut self.site.offloaded {
            Some(offloaded) => {
                accumulator.keep_apart();
                offloaded.begin(accumulator.parameters());
                if let Some(optimizer) = &mut self.site.optimizer {
                    offloaded.reserve_updates(optimizer)?;
                }
            }
            // Parts are not used with offloaded stages: a gradient outside its part is found only at the step's
            // end, after the stage's gradients have left.
            None => {
                let stages = self.site.stages.len();
                accumulator = accumulator.in_parts(self.variables.trained_by_stage(stages));
            }
        }
        Ok(accumulator.summing(run.job.summing.clone()))
    }

    /// Begins updates in this run's backward, if they are enabled.
    fn begin_updates(&mut self, run: &WorkerRun) -> Result<()> {
        let Some(offloaded) =
            self.site.offloaded.as_ref().filter(|_| self.site.optimizer.is_some())
        else {
            return Ok(());
        };
        if !offloaded.in_backward {
            return Ok(());
        }
        if !run.job.mode.is_last() || self.window.is_some() {
            return Err(PipelineError::PartsInBackward.into());
        }
        self.check_updates_in_backward(run)?;
        if let Some(optimizer) = &mut self.site.optimizer {
            // States are made before the first update, because a failure after it leaves parameters inconsistent.
            optimizer.make_states(None, |_| Ok(()))?;
        }
        let resident = self.resident_parameters(run);
        if let Some(offloaded) = &mut self.site.offloaded {
            offloaded.begin_updates(resident);
        }
        Ok(())
    }

    /// Returns the names and places of the trained parameters that stay on the device. Each is listed under
    /// the stage whose backward uses it last.
    fn resident_parameters(&self, run: &WorkerRun) -> HashMap<usize, Vec<(String, usize)>> {
        let mut last: BTreeMap<usize, (Option<usize>, usize)> = BTreeMap::new();
        let by_stage = self.variables.trained_by_stage(self.site.stages.len());
        let is_offloaded = |at| {
            let offloaded = self.site.offloaded.as_ref();
            offloaded.is_some_and(|offloaded| offloaded.is_trained(at).is_some())
        };
        for (at, places) in by_stage.iter().enumerate().filter(|(at, _)| !is_offloaded(*at)) {
            let end = run.last_backward(self.site.stages[at].id);
            for place in places {
                let known = last.entry(*place).or_insert((end, at));
                *known = (*known).max((end, at));
            }
        }
        let names: Vec<&str> = self.variables.trained().map(|v| v.name.as_str()).collect();
        let mut resident: HashMap<usize, Vec<(String, usize)>> = HashMap::new();
        for (place, (_, at)) in last {
            resident.entry(at).or_default().push((names[place].to_owned(), place));
        }
        resident
    }

    /// Fails if a stage that shares a parameter ends its backward after the parameter's owner: the optimizer
    /// updates a stage at its last backward, when the gradients of tied parameters must be complete. Weight
    /// gradients (dW) belong to the backward, and may come late.
    fn check_updates_in_backward(&self, run: &WorkerRun) -> Result<()> {
        let stage = |at: usize| self.site.stages[at].id;
        let end = |at| run.last_backward(stage(at));
        let mut ties = self.site.offloaded.iter().flat_map(OffloadedStages::ties);
        ties.find(|&(owner, user)| end(owner) < end(user)).map_or(Ok(()), |(owner, user)| {
            let (owner, user) = (stage(owner), stage(user));
            Err(PipelineError::TooEarlyInBackward { owner, user }.into())
        })
    }

    pub(crate) fn parameters(&self) -> Vec<Tensor> {
        self.variables.trained().map(|variable| variable.tensor.shallow_clone()).collect()
    }

    /// Continues the run and collects the layers' statistics; undoes them if the run fails.
    fn collecting(
        &mut self,
        run: WorkerRun,
        unmanaged: Unmanaged,
        wanted: impl Fn(ActionKind) -> bool,
    ) -> Result<(WorkerRun, Undo), WorkerFailure> {
        let collecting = Collecting::begin(false);
        let result = self.go_on(run, wanted);
        let statistics = collecting.end();
        // Each step draws from its own seed, so no random state needs restoring.
        or_undo(result, Undo { statistics, randomness: Randomness::default(), unmanaged })
    }

    /// Continues the run; a failure drops it, so that the other workers stop.
    fn go_on(
        &mut self,
        mut run: WorkerRun,
        wanted: impl Fn(ActionKind) -> bool,
    ) -> Result<WorkerRun, WorkerFailure> {
        let result = run.execute(&mut self.site, wanted);
        // Comes before `run` is dropped: the drop restores earlier gradients on their parameters' devices.
        let location = self.end_run(&mut run, result.is_ok());
        self.updated = self.site.offloaded.as_mut().map_or(0, OffloadedStages::end_updates);
        // An error drops `run`, and with it the ends of its channels: neighbours wake up and stop.
        result?;
        location?;
        Ok(run)
    }

    /// Transfers all offloaded parameters to the host, and adds up their gradients if the step succeeded.
    fn end_run(&mut self, run: &mut WorkerRun, went_well: bool) -> Result<()> {
        let Some(offloaded) = &mut self.site.offloaded else { return Ok(()) };
        match went_well {
            true => offloaded.end_step()?,
            false => offloaded.offload_all()?,
        }
        match run.accumulator.as_mut().filter(|_| went_well) {
            Some(accumulator) => offloaded.finish(accumulator),
            None => offloaded.forget(&mut run.transfer_clock),
        }
    }

    /// Keeps the results of a finished run as the current attempt; undoes the run if that fails.
    fn conclude(
        &mut self,
        run: WorkerRun,
        undo: Undo,
        report_options: ReportOptions,
    ) -> Result<WorkerDone, WorkerFailure> {
        if run.job.mode.trains() {
            let micro_batches = run.job.actions.micro_batches();
            self.unmanaged.judge(&undo.statistics, &undo.unmanaged, micro_batches);
        }
        // The run's graphs and inputs are freed in here, before the report needs memory.
        let kept = oom::catch(|| self.keep_run(run)).map_err(|caught| into_error(caught).into());
        let ((mut attempt, outputs), undo) = or_undo(kept, undo)?;
        // Set before the report: if the report fails, `self.undo` restores the state from it.
        attempt.undo = undo;
        self.attempt = Some(attempt);
        oom::catch(|| self.done(outputs, report_options)).map_err(|caught| {
            let undone = self.undo().err();
            undone.unwrap_or_else(|| into_error(caught)).into()
        })
    }

    /// Returns the attempt that remains of a finished run, still without its undo, and its outputs.
    fn keep_run(&mut self, run: WorkerRun) -> Result<(StoreAttempt, Vec<Vec<Tensor>>)> {
        let WorkerRun {
            accumulator,
            mut tally,
            outputs,
            timeline,
            transfer_clock,
            largest,
            job,
            ..
        } = run;
        // Adds in the order of the micro-batches, not of their backwards, because an error names the micro-batch's
        // number.
        for largest in largest {
            tally.add_largest(largest)?;
        }
        let groups = tally.groups(job.mode.is_last());
        // Kept with their sums: other parameters may be trained by the time of the commit.
        let (parameters, sums) =
            accumulator.map(Accumulator::finish).transpose()?.unwrap_or_default();
        (self.spans, self.host_link) = timeline.read(transfer_clock)?;
        let unit = job.weights.first().map_or(1.0, |weight| weight.unit);
        let sizes = job.weights.iter().map(|weight| weight.samples as usize).collect();
        let summed = (sums, tally, groups);
        let variables = &self.store.variables_;
        Ok((
            StoreAttempt::new(parameters, variables, summed, Undo::default(), unit, sizes),
            outputs,
        ))
    }

    fn done(
        &mut self,
        outputs: Vec<Vec<Tensor>>,
        report_options: ReportOptions,
    ) -> Result<WorkerDone> {
        let usage = self.memory.as_ref().map(|memory| memory.usage()).transpose()?;
        let peak = usage.map(|usage| usage.peak);
        // Maximum over the accumulation window.
        self.peak = peak.max(self.peak.filter(|_| self.window.is_some()));
        let needed = match (&mut self.site.cache, peak) {
            (Some(waiting), Some(peak)) => Some(waiting.end(peak)),
            _ => self.peak,
        };
        Ok(WorkerDone {
            report: report_options.at_once.then(|| self.tell(report_options.others)).transpose()?,
            outputs,
            needed,
            normalised: self.attempt.as_ref().is_some_and(StoreAttempt::normalises),
            unmanaged_norms: self.unmanaged.moving_layers(),
        })
    }
}

/// Returns a success together with `undo`; runs `undo` after a failure.
fn or_undo<T>(result: Result<T, WorkerFailure>, undo: Undo) -> Result<(T, Undo), WorkerFailure> {
    match result {
        Ok(done) => Ok((done, undo)),
        Err(failure) => {
            undo.run()?;
            Err(failure)
        }
    }
}

impl Mode {
    /// Returns whether this mode runs actions of this kind.
    pub(crate) fn runs(self, kind: ActionKind) -> bool {
        self.trains() || is_forward(kind)
    }
}

fn is_forward(kind: ActionKind) -> bool {
    kind == ActionKind::Forward
}
