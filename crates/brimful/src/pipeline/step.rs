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
use std::time::Instant;

use tch::Tensor;

use super::attempt::Told;
use super::head::{SharedLoss, common_len, head, joined, one, shared};
use super::job::End;
use super::report::Step;
use super::run::Failure;
use super::worker::Worker;
use super::{Pipeline, Work, inputs};
use crate::auto::Use;
use crate::batch::Batch;
use crate::crew::{Crew, CrewError, drawing};
use crate::loss::Part;
use crate::micro::Outcome;
use crate::micro::tally::{Group, Totals};
use crate::schedule::Actions;
use crate::{Error, Loss, Result};

impl Pipeline {
    /// Runs forward and backward, and adds to the parameters' gradients exactly what the plain model
    /// would have added on the whole mini-batch.
    ///
    /// `loss` runs on the last stage's thread, for each micro-batch once. It gets the model's output
    /// and the micro-batch's part of `target`, both on that stage's device, and returns its
    /// [`Loss`], or a pair of the loss and outputs, or a `Result` of one of them.
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
        let start = Instant::now();
        let actions = self.actions(ranges.len())?;
        let (head, collected) = head(target, ranges, self.output_device(), loss)?;
        let (inputs, end, parts) = (inputs(input, ranges)?, End::Loss(head), parts(ranges));
        drawing(&self.devices, |seed| {
            let work = Work { inputs, end, train: true, seed, parts, start };
            let crew = self.crew();
            let told =
                attempt(&crew, self.jobs(&actions, work), |worker, job| worker.attempt(job))?;
            let outputs = undone_unless(&crew, joined(&collected))?;
            let (told, totals) = settle(&crew, told, samples(ranges))?;
            let (loss, terms) = totals.map_or((0.0, Vec::new()), |t| (t.loss, t.terms));
            Ok(report(told, ranges, start, seed, actions, loss, terms).with_outputs(outputs))
        })
    }
}

/// Lets every worker try; if one fails, all undo.
pub(super) fn attempt<J: Send + 'static>(
    crew: &Crew<Worker>,
    jobs: Vec<J>,
    f: impl Fn(&mut Worker, J) -> Result<Told, Failure> + Clone + Send + 'static,
) -> Result<Vec<Told>> {
    let answers = crew.each(jobs, move |worker, job| Ok(f(worker, job)))?;
    undone_unless(crew, first_failure(answers))
}

/// Commits what all workers have tried.
pub(super) fn settle(
    crew: &Crew<Worker>,
    mut told: Vec<Told>,
    samples: f64,
) -> Result<(Vec<Told>, Option<Totals>)> {
    let loss = told.iter_mut().find_map(|told| told.loss.take());
    let factors = match &loss {
        Some((totals, groups)) => {
            groups.iter().map(|group| totals.factor(*group, samples, samples)).collect()
        }
        None => vec![Totals::default().factor(Group::Done, samples, samples)],
    };
    undone_unless(crew, prepare(crew, factors))?;
    crew.all(|worker| worker.commit())?;
    Ok((told, loss.map(|(totals, _)| totals)))
}

fn prepare(crew: &Crew<Worker>, factors: Vec<f64>) -> Result<()> {
    let leaving = crew.all(move |worker| worker.prepare(&factors))?;
    if leaving.iter().all(Vec::is_empty) {
        return Ok(());
    }
    let mut arriving: Vec<Vec<(String, Tensor)>> = (0..crew.len()).map(|_| Vec::new()).collect();
    for (owner, name, gradient) in leaving.into_iter().flatten() {
        arriving[owner].push((name, gradient));
    }
    crew.each_or_error(arriving, |worker, arriving| worker.join(arriving)).map(drop)
}

/// The result; where it is an error, every worker undoes what it has tried.
pub(super) fn undone_unless<T>(crew: &Crew<Worker>, result: Result<T>) -> Result<T> {
    if result.is_err() {
        crew.all(|worker| worker.undo())?;
    }
    result
}

/// All answers, or the error that came first: those that came later may be its consequences.
fn first_failure(answers: Vec<Result<Result<Told, Failure>>>) -> Result<Vec<Told>> {
    let mut told = Vec::new();
    let mut first: Option<(Instant, Error)> = None;
    let mut stopped = None;
    for (worker, answer) in answers.into_iter().enumerate() {
        let failed_now = |error| Err(Failure::Failed { at: Instant::now(), error });
        match answer.unwrap_or_else(failed_now) {
            Ok(answer) => told.push(answer),
            Err(Failure::Failed { at, error }) => {
                if first.as_ref().is_none_or(|(earlier, _)| at < *earlier) {
                    first = Some((at, error));
                }
            }
            Err(Failure::Stopped) => stopped = Some(CrewError::Gone { worker }.into()),
        }
    }
    match first.map(|(_, error)| error).or(stopped) {
        Some(error) => Err(error),
        None => Ok(told),
    }
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

/// Each micro-batch's place in the step.
pub(super) fn parts(ranges: &[Range<usize>]) -> Arc<[Part]> {
    let unit = samples(ranges);
    let part = |(i, range): (usize, &Range<usize>)| Part {
        samples: range.len() as f64,
        unit,
        first: i == 0,
    };
    ranges.iter().enumerate().map(part).collect()
}

/// How many samples there are.
pub(super) fn samples(ranges: &[Range<usize>]) -> f64 {
    ranges.iter().map(ExactSizeIterator::len).sum::<usize>() as f64
}
