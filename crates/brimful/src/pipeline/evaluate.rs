//! Evaluation: forward alone, without gradients, with a micro-batch size of its own.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::attempt::Told;
use super::head::{common_len, head, joined, one, shared};
use super::job::End;
use super::report::Step;
use super::step::{attempt, parts, report};
use super::{Pipeline, Work, inputs};
use crate::auto::Use;
use crate::batch::{self, Batch};
use crate::crew::undisturbed;
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
        self.open = None;
        let samples = batch::len(input)?;
        let (outputs, _) = self.sized(size.into(), Use::Map, input, samples, |this, ranges| {
            let (told, _) = this.run_forward(input, ranges, End::Gather, Instant::now())?;
            let outputs = told.into_iter().map(|told| told.outputs);
            let outputs = outputs.into_iter().find(|parts| !parts[0].is_empty());
            batch::join(outputs.unwrap_or_default())
        })?;
        Ok(outputs)
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
        self.open = None;
        let samples = common_len(input, target)?;
        let loss = shared(move |values: &[Tensor], y: &Y| loss(one(values)?, y).into_parts());
        let (step, story) =
            self.sized(size.into(), Use::Evaluate, input, samples, |this, ranges| {
                let (head, collected) = head(target, ranges, this.output_device(), &loss)?;
                let (mut told, actions) =
                    this.run_forward(input, ranges, End::Loss(head), start)?;
                let totals = told.iter_mut().find_map(|told| told.loss.take());
                let (loss, terms) = totals.map_or((0.0, Vec::new()), |(t, _)| (t.loss, t.terms));
                let step = report(told, ranges, start, 0, actions, loss, terms);
                Ok(step.with_outputs(joined(&collected)?))
            })?;
        Ok(step.with_story(story))
    }

    fn run_forward(
        &mut self,
        input: &impl Batch,
        ranges: &[Range<usize>],
        end: End,
        start: Instant,
    ) -> Result<(Vec<Told>, Arc<Actions>)> {
        let actions = self.actions(ranges.len())?;
        let (inputs, parts) = (inputs(input, ranges)?, parts(ranges));
        let work = Work { inputs, end, train: false, seed: 0, parts, start };
        let jobs = self.jobs(&actions, work);
        let run = || attempt(&self.crew(), jobs, |worker, job| worker.evaluate(job));
        Ok((undisturbed(&self.devices, run)?, actions))
    }
}
