//! Evaluation: forward alone, without gradients, with a micro-batch size of its own.

use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::attempt::Told;
use super::drawing::undisturbed;
use super::head::{common_len, head, joined, one, shared};
use super::job::End;
use super::report::Step;
use super::step::{attempt, parts, report};
use super::{Pipeline, Work, inputs, ranges};
use crate::batch::{self, Batch};
use crate::micro::Outcome;
use crate::schedule::Actions;
use crate::{Result, Size};

impl Pipeline {
    /// The model's output for the whole batch, not in training and without gradients.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval(&mut self, input: &impl Batch, size: impl Into<Size>) -> Result<Tensor> {
        let mut outputs = self.eval_many(input, size)?;
        one(&outputs)?;
        Ok(outputs.swap_remove(0))
    }

    /// The same for a model that gives several tensors.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval_many(&mut self, input: &impl Batch, size: impl Into<Size>) -> Result<Vec<Tensor>> {
        let ranges = ranges(size.into(), batch::len(input)?)?;
        let actions = self.actions(ranges.len())?;
        self.open = None;
        let work = Work {
            inputs: inputs(input, &ranges)?,
            end: End::Gather,
            train: false,
            seed: 0,
            parts: parts(&ranges),
            start: Instant::now(),
        };
        let told = self.run_forward(&actions, work)?;
        let outputs = told.into_iter().map(|told| told.outputs).find(|parts| !parts[0].is_empty());
        batch::join(outputs.unwrap_or_default())
    }

    /// The mini-batch's loss, not in training and without gradients, with what the closure gives
    /// beside it.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn evaluate<X, Y, R>(
        &mut self,
        input: &X,
        target: &Y,
        size: impl Into<Size>,
        mut loss: impl FnMut(&Tensor, &Y) -> R + Send + 'static,
    ) -> Result<Step<R::Outputs>>
    where
        X: Batch,
        Y: Batch + 'static,
        R: Outcome,
        R::Outputs: 'static,
    {
        let start = Instant::now();
        let ranges = ranges(size.into(), common_len(input, target)?)?;
        let actions = self.actions(ranges.len())?;
        self.open = None;
        let loss = move |values: &[Tensor], y: &Y| loss(one(values)?, y).into_parts();
        let (head, collected) = head(target, &ranges, self.output_device(), &shared(loss))?;
        let work = Work {
            inputs: inputs(input, &ranges)?,
            end: End::Loss(head),
            train: false,
            seed: 0,
            parts: parts(&ranges),
            start,
        };
        let mut told = self.run_forward(&actions, work)?;
        let totals = told.iter_mut().find_map(|told| told.loss.take());
        let (loss, terms) = totals.map_or((0.0, Vec::new()), |(t, _)| (t.loss, t.terms));
        let step = report(told, &ranges, start, 0, actions, loss, terms);
        Ok(step.with_outputs(joined(&collected)?))
    }

    fn run_forward(&self, actions: &Arc<Actions>, work: Work) -> Result<Vec<Told>> {
        let jobs = self.jobs(actions, work);
        let run = || attempt(&self.crew(), jobs, |worker, job| worker.evaluate(job));
        undisturbed(&self.devices, run)
    }
}
