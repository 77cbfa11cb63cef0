//! Evaluation: forward alone, without gradients, with a micro-batch size of its own.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::head::{common_len, head, one, shared};
use super::job::End;
use super::ranks::Described;
use super::report::Step;
use super::step::{Tried, attempt, counted, report};
use super::worker::Worker;
use super::{Pipeline, Work, inputs};
use crate::auto::Use;
use crate::batch::{self, Batch};
use crate::crew::undisturbed;
use crate::micro::Outcome;
use crate::schedule::Actions;
use crate::{Loss, Result, Size};

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
            let batch = [input as &dyn Described];
            let (Tried { outputs, .. }, _) =
                this.run_forward(input, &batch, ranges, End::Gather, Instant::now())?;
            this.ranks.model_outputs(this.layout.last_worker(), this.output_device(), outputs)
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
        self.evaluate_with(input, target, size.into(), move |values, y| {
            loss(one(values)?, y).into_parts()
        })
    }

    /// The same for a model that gives several tensors.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn evaluate_many<X, Y, R>(
        &mut self,
        input: &X,
        target: &Y,
        size: impl Into<Size>,
        mut loss: impl FnMut(&[Tensor], &Y) -> R + Send + 'static,
    ) -> Result<Step<R::Outputs>>
    where
        X: Batch,
        Y: Batch + 'static,
        R: Outcome,
        R::Outputs: 'static,
    {
        self.evaluate_with(input, target, size.into(), move |values, y| {
            loss(values, y).into_parts()
        })
    }

    fn evaluate_with<X, Y, O>(
        &mut self,
        input: &X,
        target: &Y,
        size: Size,
        loss: impl FnMut(&[Tensor], &Y) -> Result<(Loss, O)> + Send + 'static,
    ) -> Result<Step<O>>
    where
        X: Batch,
        Y: Batch + 'static,
        O: Batch + 'static,
    {
        let start = Instant::now();
        self.open = None;
        let (samples, loss) = (common_len(input, target)?, shared(loss));
        let (step, story) = self.sized(size, Use::Evaluate, input, samples, |this, ranges| {
            let portion = this.ranks.portion(ranges)?;
            let (head, collected) = head(target, portion.own(), this.output_device(), &loss)?;
            let batch = [input as &dyn Described, target];
            let (Tried { mut told, .. }, actions) =
                this.run_forward(input, &batch, ranges, End::Loss(head), start)?;
            let totals = counted(&mut told)?;
            let (loss, terms) = totals.map_or((0.0, Vec::new()), |(t, _)| (t.loss, t.terms));
            let step = report(told, ranges, start, 0, actions, loss, terms);
            let outputs =
                this.ranks.outputs(this.layout.last_worker(), this.output_device(), &collected)?;
            Ok(step.with_outputs(outputs))
        })?;
        Ok(step.with_story(story))
    }

    fn run_forward(
        &mut self,
        input: &impl Batch,
        batch: &[&dyn Described],
        ranges: &[Range<usize>],
        end: End,
        start: Instant,
    ) -> Result<(Tried, Arc<Actions>)> {
        let portion = self.ranks.portion(ranges)?;
        let actions = self.actions(portion.own().len().max(1))?;
        let inputs = inputs(input, portion.own())?;
        let work = Work { portion: &portion, inputs, end, train: false, seed: 0, start };
        self.open("evaluation", batch, 0)?;
        let turn = self.ranks.world.turn()?;
        let jobs = self.jobs(&actions, work, &turn)?;
        let evaluate = |worker: &mut Worker, job| worker.evaluate(job);
        let run = || attempt(&self.crew(), &self.ranks, &turn, jobs, evaluate);
        Ok((undisturbed(&self.devices, run)?, actions))
    }
}
