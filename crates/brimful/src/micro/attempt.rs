//! One attempt at a mini-batch on one device: it runs whole, or is rolled back.

use std::any::type_name;
use std::time::Instant;

use tch::Tensor;

use super::graphs::{Closure, Surroundings};
use super::pass::BatchPass;
use super::{BatchRole, IntoLoss, MicroBatcher, Parts};
use crate::accumulate::{Accumulator, Sums};
use crate::batch::{Batch, Borrower, Samples};
use crate::gradient_mode::with_graphs;
use crate::memory::Memory;
use crate::oom::{self, Caught, into_error_or_panic};
use crate::random::Randomness;
use crate::ranks::RankSum;
use crate::statistics::Pending;
use crate::step::{
    self, AttemptContext, Cut, Failed, MicroBatchInfo, MicroBatchRun, NonFinitePolicy, PartFigures,
    StoreAttempt, Tally, Undo, parameters,
};
use crate::world::WorldError;
use crate::{Error, Result};

/// Settings of an attempt.
#[derive(Debug, Clone)]
pub(crate) struct AttemptSettings {
    pub(crate) role: BatchRole,
    /// Identity of the user's closure, for CUDA graphs.
    pub(crate) closure: fn() -> Closure,
    /// Channel on which gradients are summed over the ranks while the last backward is still running.
    pub(crate) collective: Option<RankSum>,
    /// True if no other rank or replica takes part, so that leaves outside the store may have gradients too.
    pub(crate) alone: bool,
}

impl MicroBatcher {
    /// Runs forward and backward as the step's only part in this process; `last` says whether the commit comes
    /// next.
    pub(super) fn attempt_alone<B: Batch, R: IntoLoss>(
        &mut self,
        batch: &B,
        context: AttemptContext<'_>,
        last: bool,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(Parts, R::Outputs), Failed> {
        let AttemptContext { cut, handshake, exchange } = context;
        let role = step::role(self, handshake, 0, last);
        let collective = exchange.summing().filter(|_| last);
        let (closure, alone) = (identity(f), self.state.team.is_alone());
        let how = AttemptSettings { role, closure, collective, alone };
        self.only_part(|this| this.attempt(batch, cut, how, f))
    }

    /// Runs the step's only part in this process.
    pub(super) fn only_part<O>(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<(StoreAttempt, O)>,
    ) -> Result<(Parts, O), Failed> {
        let start = Instant::now();
        let (attempt, outputs) = oom::catch(|| run(self))?;
        let figures = self.figures_of(&attempt, start);
        let (attempt, figures) = attempt.unless_failed(figures)?;
        Ok((Parts { attempt, figures: vec![Some(figures)] }, outputs))
    }

    /// Returns the figures of a part that began at `start`.
    pub(crate) fn figures_of(
        &mut self,
        attempt: &StoreAttempt,
        start: Instant,
    ) -> Result<PartFigures> {
        let usage = self.memory.as_ref().map(Memory::usage).transpose()?;
        let peak = usage.map(|usage| usage.peak);
        let (peak, replayed, captured) = match &mut self.graphs {
            Some(graphs) => {
                let peak = peak.map(|peak| graphs.room.take_peak(peak));
                (peak, std::mem::take(&mut graphs.replayed), graphs.new)
            }
            None => (peak, 0, false),
        };
        Ok(PartFigures {
            samples: attempt.samples(),
            time: start.elapsed(),
            peak,
            replayed,
            captured,
            unmanaged_norms: self.unmanaged.moving_layers(),
        })
    }

    /// Runs forward and backward over the micro-batches and commits nothing. Reruns them eagerly where a
    /// captured graph turns out to be out of date.
    pub(crate) fn attempt<B: Batch, R: IntoLoss>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        how: AttemptSettings,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(StoreAttempt, R::Outputs)> {
        let again = self.graphs.is_some().then(|| how.clone());
        match (self.attempt_once(batch, cut, how, false, f), again) {
            // Handled here, so that for sizes, replicas and ranks it is one attempt.
            (Err(Error::OutOfDate), Some(how)) => {
                cut.restart();
                self.attempt_once(batch, cut, how, true, f)
            }
            (ended, _) => ended,
        }
    }

    /// Runs all micro-batches, each by CUDA graph or eagerly.
    fn attempt_once<B: Batch, R: IntoLoss>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        how: AttemptSettings,
        eager: bool,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(StoreAttempt, R::Outputs)> {
        let role = how.role;
        let closure = self.graphs.is_some().then(|| (how.closure)());
        let given_count = cut.given_count();
        self.begin_peak()?;
        let ((summed, tally, outputs), undo) = self.trained(cut, |this, cut| {
            let mut pass = this.begin_pass(how, eager)?;
            let borrower = Borrower::of(f);
            let mut micro_batches = cut.micro_batches(batch, role, &this.copy_streams, borrower);
            while let Some((info, micro_batch)) = micro_batches.next()? {
                let MicroBatchInfo { number, weight, is_trial, .. } = info;
                // Only the last backward completes gradients, so only during it may they go to other ranks.
                if Some(number + 1) == given_count {
                    pass.accumulator.expect_the_last();
                }
                let format_choice = &this.format_choice;
                let mut ran = match (&mut this.graphs, closure) {
                    (Some(graphs), Some(closure)) => {
                        // A size that is only being tried is not worth a capture.
                        let is_steady = !is_trial;
                        let surroundings = Surroundings { format_choice, closure, is_steady };
                        graphs.run(&mut pass, micro_batch, &weight, f, &surroundings)
                    }
                    _ => {
                        let formatted = format_choice.of(micro_batch);
                        let ran = formatted.and_then(|batch| pass.run(batch, &weight, f));
                        ran.map(|()| MicroBatchRun::PLAINLY)
                    }
                };
                if ran.is_ok() && this.state.non_finite == NonFinitePolicy::RefuseGradients {
                    let largest = pass.accumulator.largest();
                    let added = largest.and_then(|largest| pass.tally.add_largest(largest));
                    ran = added.and(ran);
                }
                micro_batches.done(ran)?;
            }
            drop(micro_batches);
            let outputs = joined(pass.outputs, cut.samples())?;
            Ok((pass.accumulator.finish()?, pass.tally, outputs))
        })?;
        Ok((self.attempt_of(summed, tally, undo, role, cut), outputs))
    }

    /// Wraps the sums of a mini-batch that has run in this role, with their parameters.
    pub(super) fn attempt_of(
        &self,
        (parameters, sums): (Vec<Tensor>, Sums),
        tally: Tally,
        undo: Undo,
        role: BatchRole,
        cut: &Cut,
    ) -> StoreAttempt {
        let groups = tally.groups(role.last);
        let (summed, sizes) = ((sums, tally, groups), cut.sizes().to_vec());
        let mut attempt =
            StoreAttempt::new(parameters, &self.variables, summed, undo, role.unit, sizes);
        attempt.peak = cut.peak();
        attempt
    }

    /// Starts a pass over a mini-batch.
    fn begin_pass<O>(&mut self, how: AttemptSettings, eager: bool) -> Result<BatchPass<O>> {
        let AttemptSettings { role, collective, alone, .. } = how;
        let parameters = parameters(&self.variables);
        // Not between the parts of a step: its sums have the memory format that the parameters had at its
        // start.
        if role.begins {
            self.format_choice.begin(&parameters)?;
        }
        if let Some(graphs) = &mut self.graphs {
            graphs.begin(parameters.len(), &self.variables, eager)?;
        }
        let accumulator = Accumulator::begin(parameters, &self.variables)?
            .summing(collective)
            .summing_others(alone);
        let window = self.state.window.as_ref();
        let tally =
            window.map_or_else(Tally::default, |window| window.attempt.attempt.tally.following());
        Ok(BatchPass { accumulator, tally, outputs: Vec::new(), single: role.last })
    }

    /// Resets the peak memory, which from now on is this attempt's, however many passes it takes.
    pub(super) fn begin_peak(&self) -> Result<()> {
        self.memory.as_ref().map_or(Ok(()), Memory::reset_peak)
    }

    /// Runs a part of a training step in [`MicroBatcher::guarded`], and learns which statistics no layer reports.
    pub(super) fn trained<T>(
        &mut self,
        cut: &mut Cut,
        f: impl FnOnce(&mut Self, &mut Cut) -> Result<T>,
    ) -> Result<(T, Undo)> {
        let (value, undo) = self.guarded(|this| f(this, cut))?;
        self.unmanaged.judge(&undo.statistics, &undo.unmanaged, cut.sizes().len());
        Ok((value, undo))
    }

    /// Runs `f` inside the memory; restores statistics and random state if it fails.
    pub(super) fn guarded<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<(T, Undo)> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        // Noted before the first number is drawn, so that a retry draws the same dropout masks.
        let randomness = Randomness::now(self.device)?;
        let unmanaged = self.unmanaged.save(&self.variables)?;
        let (statistics, result) =
            Pending::collect(false, || oom::catch(|| with_graphs(true, || f(self))));
        let undo = Undo { statistics, randomness, unmanaged };
        match result {
            Ok(value) => Ok((value, undo)),
            Err(caught) => {
                undo.run()?;
                // Graphs keep memory that the next attempt may need, whichever layer retries.
                if matches!(caught, Caught::OutOfMemory(_)) {
                    self.graphs.as_mut().map_or(Ok(()), |graphs| graphs.clear())?;
                }
                Err(into_error_or_panic(caught))
            }
        }
    }
}

/// Returns a function that identifies a closure by its type.
pub(crate) fn identity<F>(_: &F) -> fn() -> Closure {
    Closure::of_type::<F>
}

/// Joins the outputs of all micro-batches of these samples. A rank without a sample gets blank outputs.
pub(super) fn joined<O: Batch>(outputs: Vec<O>, samples: &Samples) -> Result<O> {
    if !outputs.is_empty() {
        return samples.restored(samples.join(outputs)?);
    }
    O::blank().ok_or_else(|| WorldError::NoForm { name: type_name::<O>().into() }.into())
}
