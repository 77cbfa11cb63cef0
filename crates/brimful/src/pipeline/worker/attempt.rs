//! One worker's try at a step: its actions, and what commits or undoes them.

use tch::Tensor;

use super::Worker;
use crate::accumulate::{Accumulator, Sums};
use crate::bytes::Bytes;
use crate::optim::Optimizer;
use crate::pipeline::error::PipelineError;
use crate::pipeline::home::{HandsOver, HostedStages};
use crate::pipeline::run::{Job, Mode, StepExtent, Tensors, WorkerFailure, WorkerRun};
use crate::random::Randomness;
use crate::schedule::{ActionKind, Awaited};
use crate::statistics::Pending;
use crate::step::{PartReport, Tally, Tried, Undo};
use crate::workers::into_error;
use crate::{Result, oom};

/// What a worker gives of its part of a step; what commits or undoes it stays with the worker.
#[derive(Debug, Default)]
pub(crate) struct WorkerDone {
    /// What all have to know of it, if that was asked for.
    pub(crate) report: Option<PartReport>,
    /// Gathered outputs, by micro-batch.
    pub(crate) outputs: Vec<Vec<Tensor>>,
    /// Of its memory, without what could have waited elsewhere.
    pub(crate) needed: Option<Bytes>,
    /// Whether layers of this library normalised micro-batches, each by itself.
    pub(crate) normalised: bool,
    /// BatchNorm layers of others in its stages.
    pub(crate) unmanaged_norms: usize,
}

/// Whether a worker tells of its part as soon as it was run, and whether other replicas need that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tells {
    pub(crate) at_once: bool,
    pub(crate) others: bool,
}

/// A step as those are told of it who have no micro-batch in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Idle {
    pub(crate) trains: bool,
    /// What the others' gradients are divided by until the commit.
    pub(crate) unit: f64,
    pub(crate) tells: Tells,
}

/// Running statistics that nobody reports, each with a copy of what it was.
type Unmanaged = Vec<(Tensor, Tensor)>;

impl Worker {
    /// Runs a whole mini-batch, and keeps what commits or undoes it.
    pub(crate) fn attempt(&mut self, job: Job, tells: Tells) -> Result<WorkerDone, WorkerFailure> {
        // On this thread, not the caller's: whether graphs are made is a setting of each thread.
        let _without = (!job.mode.trains()).then(tch::no_grad_guard);
        let (mut run, unmanaged) = self.begin(job)?;
        if run.job.mode.trains() {
            run.accumulator = Some(self.accumulator(&run)?);
            self.begin_handing(&mut run)?;
        }
        let mode = run.job.mode;
        let (run, undo) = self.collecting(run, unmanaged, |kind| mode.runs(kind))?;
        self.conclude(run, undo, tells)
    }

    /// Runs the forwards of a step whose loss is not known yet.
    pub(crate) fn attempt_forward(&mut self, job: Job) -> Result<WorkerDone, WorkerFailure> {
        let (run, unmanaged) = self.begin(job)?;
        let (mut run, undo) = self.collecting(run, unmanaged, is_forward)?;
        let outputs = std::mem::take(&mut run.outputs);
        self.open = Some((run, undo));
        Ok(WorkerDone { outputs, ..WorkerDone::default() })
    }

    /// Runs the backwards of that step, from these gradients of each micro-batch's outputs.
    pub(crate) fn attempt_backward(
        &mut self,
        gradients: Vec<Tensors>,
        tells: Tells,
    ) -> Result<WorkerDone, WorkerFailure> {
        let (mut run, undo) = self.open.take().expect("the pipeline knows that one is open");
        run.output_gradients = gradients;
        // Not before: what the caller does to gradients and parameters since the forward counts.
        let result = self.accumulator(&run).map_err(WorkerFailure::from).and_then(|accumulator| {
            run.accumulator = Some(accumulator);
            self.go_on(run, |_| true)
        });
        let (run, undo) = or_undo(result, undo)?;
        self.conclude(run, undo, tells)
    }

    /// Takes part in a step in which other pipelines have all micro-batches.
    pub(crate) fn idle(&mut self, idle: Idle) -> Result<WorkerDone, WorkerFailure> {
        let Idle { trains, unit, tells } = idle;
        self.undo()?;
        // Those that run wait for each stage's update as they fetch it.
        self.settle()?;
        let nothing = (Sums::none(self.site.homes.is_some()), Tally::default(), Vec::new());
        // What is trained is compared with those that run: in an evaluation they train nothing.
        let parameters = if trains { self.parameters() } else { Vec::new() };
        let variables = &self.store.variables_;
        let undo = Undo::default();
        // Something with no gradients, not nothing: it takes part in votes and sums as all others do, and
        // divides what they have summed by the same numbers.
        self.tried = Some(Tried::new(parameters, variables, nothing, undo, unit, Vec::new()));
        (self.spans, self.bus) = Default::default();
        Ok(self.done(Vec::new(), tells)?)
    }

    fn begin(&mut self, job: Job) -> Result<(WorkerRun, Unmanaged)> {
        // Parameters are about to move, which the optimizer at home must not look at then.
        self.stop_looking_ahead()?;
        // A forward that nobody came back to holds its graphs: they would count in this run's peak.
        self.undo()?;
        self.lay_out(job.channels_last)?;
        if let Some(memory) = &self.memory {
            memory.reset_peak()?;
        }
        if let Some(waiting) = &mut self.site.waiting {
            let samples = || job.weights.iter().map(|weight| weight.samples as u64);
            let largest_micro_batch = samples().max().unwrap_or(0);
            let extent = StepExtent { largest_micro_batch, mini_batch: samples().sum() };
            waiting.begin(job.mode.trains(), extent)?;
        }
        self.site.trains = self.variables.trained().next().is_some();
        if !job.mode.trains() {
            return Ok((WorkerRun::new(job, self)?, Vec::new()));
        }
        let unmanaged = self.unmanaged.save(&self.store.variables_)?;
        self.site.unmanaged = unmanaged.iter().map(|(running, _)| running.data()).collect();
        Ok((WorkerRun::new(job, self)?, unmanaged))
    }

    /// Collects the run's gradients, apart from those that are there.
    fn accumulator(&mut self, run: &WorkerRun) -> Result<Accumulator> {
        self.forget_ahead()?;
        let mut accumulator = Accumulator::begin(self.parameters(), &self.store.variables_)?;
        match &mut self.site.homes {
            Some(homes) => {
                accumulator.keep_apart();
                homes.begin(accumulator.parameters());
            }
            // Of one that goes home before the step's end, nothing may be found at the end alone.
            None => {
                let stages = self.site.stages.len();
                accumulator = accumulator.in_parts(self.variables.trained_by_stage(stages));
            }
        }
        Ok(accumulator.summing(run.job.summing.clone()))
    }

    /// Lets the optimizer at home have this run's gradients as they come, if it is to.
    fn begin_handing(&mut self, run: &mut WorkerRun) -> Result<()> {
        let Some(homes) = &mut self.site.homes else { return Ok(()) };
        let is_alone = run.job.mode.is_last() && self.window.is_none();
        match homes.hands_over {
            HandsOver::Following if !is_alone => Err(PipelineError::FollowsParts.into()),
            HandsOver::Following => self.begin_following(run),
            HandsOver::Ahead | HandsOver::AtTheStep => {
                // A gradient that was there before is added to: the step's is another.
                let adds = run.accumulator.as_ref().is_some_and(Accumulator::has_aside);
                if is_alone
                    && !adds
                    && homes.wants_ahead()
                    && let Err(cause) = homes.begin_handing(&mut self.optimizer)
                {
                    tracing::debug!(%cause, "updates are not computed ahead");
                }
                Ok(())
            }
        }
    }

    fn begin_following(&mut self, run: &mut WorkerRun) -> Result<()> {
        self.check_following(run)?;
        run.moving.waiting(Awaited::Update, || self.settle())?;
        match &mut self.site.homes {
            Some(homes) if self.optimizer.is_some() => homes.begin_handing(&mut self.optimizer),
            _ => Ok(()),
        }
    }

    /// A stage is updated when it has run its last backward: by then, others have to have run theirs that add to
    /// the gradients of its parameters. Weight halves may come later.
    fn check_following(&self, run: &WorkerRun) -> Result<()> {
        let list = &run.job.actions.lists()[self.number];
        let stage = |at: usize| self.site.stages[at].id;
        let end = |at| list.iter().rposition(|a| a.stage == stage(at) && a.kind.releases());
        let mut ties = self.site.homes.iter().flat_map(HostedStages::ties);
        ties.find(|&(owner, user)| end(owner) < end(user)).map_or(Ok(()), |(owner, user)| {
            let (owner, user) = (stage(owner), stage(user));
            Err(PipelineError::FollowsTooEarly { owner, user }.into())
        })
    }

    fn stop_looking_ahead(&mut self) -> Result<()> {
        match self.site.homes.as_ref().is_some_and(HostedStages::is_looking_ahead) {
            true => self.settle(),
            false => Ok(()),
        }
    }

    /// Gives up what was computed ahead of a step that never came: new gradients are about to lie where
    /// those did.
    fn forget_ahead(&mut self) -> Result<()> {
        self.stop_looking_ahead()?;
        let had = self.optimizer.as_mut().is_some_and(Optimizer::forget_ahead);
        if let Some(homes) = self.site.homes.as_mut().filter(|_| had) {
            homes.pause_ahead();
        }
        Ok(())
    }

    pub(crate) fn parameters(&self) -> Vec<Tensor> {
        self.variables.trained().map(|variable| variable.tensor.shallow_clone()).collect()
    }

    /// Runs on while the layers' statistics are collected; undoes it where that fails.
    fn collecting(
        &mut self,
        run: WorkerRun,
        unmanaged: Unmanaged,
        wanted: impl Fn(ActionKind) -> bool,
    ) -> Result<(WorkerRun, Undo), WorkerFailure> {
        let (statistics, result) = Pending::collect(false, || self.go_on(run, wanted));
        // A step's random numbers are its own: nothing of them is to be put back.
        or_undo(result, Undo { statistics, randomness: Randomness::default(), unmanaged })
    }

    /// Runs on; what it holds is let go where that fails, so that the others stop.
    fn go_on(
        &mut self,
        mut run: WorkerRun,
        wanted: impl Fn(ActionKind) -> bool,
    ) -> Result<WorkerRun, WorkerFailure> {
        let result = run.execute(&mut self.site, wanted);
        // Before `run` is dropped, which puts earlier gradients back where their parameters live.
        let home = self.site.send_all_home(&mut run, result.is_ok());
        self.updated = self.site.homes.as_mut().map_or(0, HostedStages::end_handing);
        // An error drops `run`, and with it the ends of its channels: neighbours wake up and stop.
        result?;
        home?;
        Ok(run)
    }

    /// Keeps what was run, or undoes it.
    fn conclude(
        &mut self,
        run: WorkerRun,
        undo: Undo,
        tells: Tells,
    ) -> Result<WorkerDone, WorkerFailure> {
        if run.job.mode.trains() {
            let micro_batches = run.job.actions.micro_batches();
            self.unmanaged.judge(&undo.statistics, &undo.unmanaged, micro_batches);
        }
        // The run's graphs and inputs end in here, before what follows needs memory.
        let kept = oom::catch(|| self.keep_run(run)).map_err(|caught| into_error(caught).into());
        let ((mut tried, outputs), undo) = or_undo(kept, undo)?;
        // Before it is told of: where that fails, `undo` finds here what is to be put back.
        tried.undo = undo;
        self.tried = Some(tried);
        oom::catch(|| self.done(outputs, tells)).map_err(|caught| {
            let undone = self.undo().err();
            undone.unwrap_or_else(|| into_error(caught)).into()
        })
    }

    /// What remains of a run that has come to its end, yet without how it is undone; and its outputs.
    fn keep_run(&mut self, run: WorkerRun) -> Result<(Tried, Vec<Vec<Tensor>>)> {
        let WorkerRun { accumulator, mut tally, outputs, timeline, moving, largest, job, .. } = run;
        // By micro-batch, in whatever order their backwards ran: a refusal names the number.
        for largest in largest {
            tally.add_largest(largest)?;
        }
        let groups = tally.groups(job.mode.is_last());
        // Those that the sums are of: others may be trained by the time of the commit.
        let (parameters, sums) =
            accumulator.map(Accumulator::finish).transpose()?.unwrap_or_default();
        (self.spans, self.bus) = timeline.read(moving)?;
        let unit = job.weights.first().map_or(1.0, |weight| weight.unit);
        let sizes = job.weights.iter().map(|weight| weight.samples as usize).collect();
        let summed = (sums, tally, groups);
        let variables = &self.store.variables_;
        Ok((Tried::new(parameters, variables, summed, Undo::default(), unit, sizes), outputs))
    }

    fn done(&mut self, outputs: Vec<Vec<Tensor>>, tells: Tells) -> Result<WorkerDone> {
        let usage = self.memory.as_ref().map(|memory| memory.usage()).transpose()?;
        let peak = usage.map(|usage| usage.peak);
        // Of all mini-batches that wait for one commit.
        self.peak = peak.max(self.peak.filter(|_| self.window.is_some()));
        let needed = match (&mut self.site.waiting, peak) {
            (Some(waiting), Some(peak)) => Some(waiting.end(peak)),
            _ => self.peak,
        };
        Ok(WorkerDone {
            report: tells.at_once.then(|| self.tell(tells.others)).transpose()?,
            outputs,
            needed,
            normalised: self.tried.as_ref().is_some_and(Tried::normalises),
            unmanaged_norms: self.unmanaged.moving_layers(),
        })
    }
}

/// What went well, with how it is undone; what did not is undone now.
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
    /// The actions that it runs.
    pub(crate) fn runs(self, kind: ActionKind) -> bool {
        self.trains() || is_forward(kind)
    }
}

fn is_forward(kind: ActionKind) -> bool {
    kind == ActionKind::Forward
}
