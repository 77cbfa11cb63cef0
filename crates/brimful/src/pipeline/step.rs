//! A step: every worker tries, and then all commit, or all undo.
//!
//! ```text
//!   attempt   every worker runs its actions; loss and gradients are summed up beside the old ones
//!   prepare   all that a commit needs is computed; gradients of shared variables go to their owners
//!   commit    gradients and statistics are put in place, which needs no memory
//!   undo      wherever attempt or prepare failed: what was tried is dropped
//! ```

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::Tensor;

use super::attempt::Told;
use super::commit::Seen;
use super::head::{SharedLoss, common_len, head, one, shared};
use super::job::End;
use super::ranks::Ranks;
use super::report::Step;
use super::run::Failure;
use super::worker::Worker;
use super::{Pipeline, Work, ties, training_inputs};
use crate::auto::Use;
use crate::batch::Batch;
use crate::crew::{Crew, CrewError, drawing};
use crate::micro::Outcome;
use crate::micro::tally::{Counted, Group, Totals};
use crate::schedule::Actions;
use crate::world::Turn;
use crate::{Error, Loss, Result};

impl Pipeline {
    /// Runs forward and backward, and adds to the parameters' gradients exactly what the plain model
    /// would have added on the whole mini-batch.
    ///
    /// `loss` runs on the last stage's thread, for each micro-batch once, and again where an automatic
    /// size tries the step again. It gets the model's output and the micro-batch's part of `target`,
    /// both on that stage's device, and returns its [`Loss`], or a pair of the loss and outputs, or a
    /// `Result` of one of them.
    ///
    /// # Errors
    /// When anything fails, in whatever stage: gradients, statistics and random state are as before,
    /// and the pipeline can be used again.
    pub fn step<X, Y, R>(
        &mut self,
        input: &X,
        target: &Y,
        mut loss: impl FnMut(&Tensor, &Y) -> R + Send + 'static,
    ) -> Result<Step<R::Outputs>>
    where
        X: Batch,
        Y: Batch + 'static,
        R: Outcome,
        R::Outputs: 'static,
    {
        self.step_with(input, target, move |values, y| loss(one(values)?, y).into_parts())
    }

    /// The same for a model that gives several tensors.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn step_many<X, Y, R>(
        &mut self,
        input: &X,
        target: &Y,
        mut loss: impl FnMut(&[Tensor], &Y) -> R + Send + 'static,
    ) -> Result<Step<R::Outputs>>
    where
        X: Batch,
        Y: Batch + 'static,
        R: Outcome,
        R::Outputs: 'static,
    {
        self.step_with(input, target, move |values, y| loss(values, y).into_parts())
    }

    fn step_with<X, Y, O>(
        &mut self,
        input: &X,
        target: &Y,
        loss: impl FnMut(&[Tensor], &Y) -> Result<(Loss, O)> + Send + 'static,
    ) -> Result<Step<O>>
    where
        X: Batch,
        Y: Batch + 'static,
        O: Batch + 'static,
    {
        self.open = None;
        let (samples, loss) = (common_len(input, target)?, shared(loss));
        let (step, story) = self.sized(self.size, Use::Train, input, samples, |this, ranges| {
            this.try_step(input, target, &loss, ranges)
        })?;
        Ok(step.with_story(story))
    }

    /// One step over these micro-batches: whole, or as if it had not been tried. The closure can be
    /// used for another try.
    fn try_step<Y, O, F>(
        &mut self,
        input: &impl Batch,
        target: &Y,
        loss: &SharedLoss<F>,
        ranges: &[Range<usize>],
    ) -> Result<Step<O>>
    where
        Y: Batch + 'static,
        O: Batch + 'static,
        F: FnMut(&[Tensor], &Y) -> Result<(Loss, O)> + Send + 'static,
    {
        let (start, portion) = (Instant::now(), self.ranks.portion(ranges)?);
        let own = portion.own();
        let actions = self.actions(own.len().max(1))?;
        let (head, collected) = head(target, own, self.output_device(), loss)?;
        let (inputs, end) = (training_inputs(input, own)?, End::Loss(head));
        drawing(&self.devices, |seed| {
            let seed = self.open("step", &[input, target], seed)?;
            let (crew, ranks) = (self.crew(), &self.ranks);
            ranks.check_trained(&crew)?;
            let turn = ranks.world.turn()?;
            let work = Work { portion: &portion, inputs, end, train: true, seed, start };
            let jobs = self.jobs(&actions, work, &turn)?;
            let Tried { mut told, .. } =
                attempt(&crew, ranks, &turn, jobs, |worker, job| worker.attempt(job))?;
            let outputs =
                ranks.outputs(self.layout.last_worker(), self.output_device(), &collected);
            let outputs = undone_unless(&crew, outputs)?;
            let totals = settle(&crew, ranks, &turn, &mut told, portion.samples())?;
            let (loss, terms) = totals.map_or((0.0, Vec::new()), |t| (t.loss, t.terms));
            Ok(report(told, ranges, start, seed, actions, loss, terms).with_outputs(outputs))
        })
    }
}

/// A step that all workers have run.
pub(super) struct Tried {
    /// What all of them tell.
    pub(super) told: Vec<Told>,
    /// The outputs that were gathered here, by micro-batch.
    pub(super) outputs: Vec<Vec<Tensor>>,
}

/// Lets every worker try, here and in other ranks; if one fails, all undo.
pub(super) fn attempt<J: Send + 'static>(
    crew: &Crew<Worker>,
    ranks: &Ranks,
    turn: &Turn,
    jobs: Vec<J>,
    f: impl Fn(&mut Worker, J) -> Result<Told, Failure> + Clone + Send + 'static,
) -> Result<Tried> {
    if jobs.is_empty() {
        return idle(crew, ranks, turn);
    }
    let (start, shared) = (Instant::now(), turn.clone());
    let answers = crew.each(jobs, move |worker, job| {
        // Others may wait for this one, in other ranks too.
        let stopping = shared.stopping();
        let told = f(worker, job);
        if told.is_ok() {
            stopping.all_went_well();
        }
        Ok(told)
    });
    let answers = answers.map_err(|error| (start.elapsed(), error));
    let mut told = answers.and_then(|answers| first_failure(answers, start));
    let outputs = told.as_mut().map_or_else(|_| Vec::new(), |told| outputs(told));
    let all = undone_unless(crew, ranks.settle("step", turn, told))?;
    Ok(Tried { told: all.into_iter().flatten().collect(), outputs })
}

/// Takes part where other pipelines have all micro-batches.
fn idle(crew: &Crew<Worker>, ranks: &Ranks, turn: &Turn) -> Result<Tried> {
    let jobs = ranks.here().map(|worker| ranks.summing(turn, worker)).collect();
    let told = crew.each_or_error(jobs, |worker, summing| worker.idle(summing));
    let told = told.map_err(|error| (Duration::ZERO, error));
    let all = undone_unless(crew, ranks.settle("step", turn, told))?;
    Ok(Tried { told: all.into_iter().flatten().collect(), outputs: Vec::new() })
}

/// The outputs that were gathered by the worker with the last stage.
fn outputs(told: &mut [Told]) -> Vec<Vec<Tensor>> {
    let mut all = told.iter_mut().map(|told| std::mem::take(&mut told.outputs));
    all.find(|parts| parts.first().is_some_and(|part| !part.is_empty())).unwrap_or_default()
}

/// Commits what all workers have tried.
pub(super) fn settle(
    crew: &Crew<Worker>,
    ranks: &Ranks,
    turn: &Turn,
    told: &mut [Told],
    samples: f64,
) -> Result<Option<Totals>> {
    let start = Instant::now();
    let loss = undone_unless(crew, counted(told))?;
    let factors = match &loss {
        Some((totals, groups)) => {
            groups.iter().map(|group| totals.factor(*group, samples, samples)).collect()
        }
        None => vec![Totals::default().factor(Group::Done, samples, samples)],
    };
    let seen = ranks.here().map(|worker| seen(told, worker, ranks)).collect();
    let prepared = prepare(crew, ranks, turn, factors, seen);
    let prepared = prepared.map_err(|error| (start.elapsed(), error));
    undone_unless(crew, ranks.settle("commit", turn, prepared))?;
    crew.all(|worker| worker.commit())?;
    Ok(loss.map(|(totals, _)| totals))
}

/// What this worker has seen in all pipelines, whose workers tell one after the other.
fn seen(told: &[Told], worker: usize, ranks: &Ranks) -> Seen {
    let mut all = Seen::default();
    let pipelines = told.chunks(told.len() / ranks.replicas);
    for Told { present, layers, .. } in pipelines.filter_map(|workers| workers.get(worker)) {
        all.present.resize(present.len(), false);
        all.present.iter_mut().zip(present).for_each(|(any, has)| *any |= has);
        all.layers.extend(layers.iter().cloned());
    }
    all
}

/// The loss of the whole mini-batch, with the groups of its terms, where there is one.
pub(super) fn counted(told: &mut [Told]) -> Result<Option<(Totals, Vec<Group>)>> {
    let mut all = Counted::default();
    let mut common = None;
    for (counted, groups) in told.iter_mut().filter_map(|told| told.loss.take()) {
        all.add(counted)?;
        common.get_or_insert(groups);
    }
    common.map(|groups| Ok((all.totals()?, groups))).transpose()
}

fn prepare(
    crew: &Crew<Worker>,
    ranks: &Ranks,
    turn: &Turn,
    factors: Vec<f64>,
    seen: Vec<Seen>,
) -> Result<()> {
    let prepare = move |worker: &mut Worker, seen| worker.prepare(&factors, seen);
    ties::gather(crew, ranks, turn, crew.each_or_error(seen, prepare)?)
}

/// The result; where it is an error, every worker undoes what it has tried.
pub(super) fn undone_unless<T>(crew: &Crew<Worker>, result: Result<T>) -> Result<T> {
    if result.is_err() {
        crew.all(|worker| worker.undo())?;
    }
    result
}

/// All answers, or the error that came first, with its time since the start: those that came later
/// may be its consequences.
fn first_failure(
    answers: Vec<Result<Result<Told, Failure>>>,
    start: Instant,
) -> Result<Vec<Told>, (Duration, Error)> {
    let mut told = Vec::new();
    let mut first: Option<(Duration, Error)> = None;
    for (worker, answer) in answers.into_iter().enumerate() {
        let failed_now = |error| Err(Failure::Failed { at: Instant::now(), error });
        let (at, error) = match answer.unwrap_or_else(failed_now) {
            Ok(answer) => {
                told.push(answer);
                continue;
            }
            Err(Failure::Failed { at, error }) => (at.saturating_duration_since(start), error),
            // Somebody else failed before, here or in another rank.
            Err(Failure::Stopped) => (Duration::MAX, CrewError::Gone { worker }.into()),
        };
        if first.as_ref().is_none_or(|(earlier, _)| at < *earlier) {
            first = Some((at, error));
        }
    }
    first.map_or(Ok(told), Err)
}

pub(super) fn report(
    told: Vec<Told>,
    ranges: &[Range<usize>],
    start: Instant,
    seed: u64,
    actions: Arc<Actions>,
    loss: f64,
    terms: Vec<f64>,
) -> Step {
    let sizes: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
    let (mut peaks, mut timeline) = (Vec::new(), Vec::new());
    for Told { spans, peak, .. } in told {
        peaks.push(peak);
        timeline.push(spans);
    }
    let (samples, time) = (sizes.iter().sum(), start.elapsed());
    let (decisions, retries) = (Vec::new(), 0);
    Step {
        loss,
        terms,
        samples,
        sizes,
        outputs: (),
        time,
        peaks,
        seed,
        actions,
        timeline,
        decisions,
        retries,
    }
}
