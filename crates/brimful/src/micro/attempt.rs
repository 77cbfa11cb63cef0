//! One attempt at a mini-batch on one device, which completes or is rolled back.

use std::any::type_name;
use std::time::Instant;

use brimful_torch::arena::ArenaGuard;
use brimful_torch::grad_mode::GradMode;
use tch::Tensor;

use super::graphs::{Closure, Surroundings};
use super::pass::BatchPass;
use super::{BatchRole, MicroBatcher, Parts};
use crate::accumulate::{Accumulator, Sums, parameters};
use crate::batch::{Batch, Borrower, Samples};
use crate::loss::IntoLoss;
use crate::memory::Memory;
use crate::oom::{self, Caught};
use crate::random::Randomness;
use crate::ranks::RankSum;
use crate::statistics::Collecting;
use crate::step::{
    self, Cut, Exchange, Failed, Handshake, MicroBatchInfo, MicroBatchRun, NonFinitePolicy,
    PartFigures, StoreAttempt, Tally, Undo,
};
use crate::world::WorldError;
use crate::{Error, Result};

/// Settings of an attempt.
#[derive(Debug)]
pub(crate) struct AttemptSettings {
    pub(crate) role: BatchRole,
    /// Identity of the user's closure, for CUDA graphs.
    pub(crate) closure: fn() -> Closure,
    /// Channel on which gradients are summed over the ranks while the last backward is still running.
    pub(crate) collective: Option<RankSum>,
    /// True if no other rank or replica takes part, so that leaves outside the store may have gradients too.
    pub(crate) alone: bool,
}

/// State before an attempt, and the guards under which the attempt runs: its memory, the grad mode, and the
/// collection of statistics. [`MicroBatcher::end`] rolls back. A drop does not, because it could not report a
/// failed rollback.
#[derive(Debug)]
pub(super) struct Before {
    _inside: Option<ArenaGuard>,
    randomness: Randomness,
    unmanaged: Vec<(Tensor, Tensor)>,
    collecting: Collecting,
    graphs: GradMode,
}

impl MicroBatcher {
    /// Returns the settings of an attempt at the step's only part in this process; `last` says whether the commit
    /// comes next.
    pub(super) fn settings<F>(
        &mut self,
        handshake: &Handshake,
        exchange: &Exchange,
        last: bool,
        f: &F,
    ) -> AttemptSettings {
        let role = step::role(self, handshake, 0, last);
        let collective = exchange.summing().filter(|_| last);
        let alone = self.state.team.is_alone();
        AttemptSettings { role, closure: identity(f), collective, alone }
    }

    /// Adds its figures, such as time and peak memory, to a part that began at `start`: the only part of the step
    /// in this process. If they cannot be read, undoes the part.
    pub(super) fn only_part<O>(
        &mut self,
        start: Instant,
        ran: Result<(StoreAttempt, O), Caught<Error>>,
    ) -> Result<(Parts, O), Failed> {
        let (attempt, outputs) = ran?;
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

    /// Runs forward and backward over the micro-batches, each eagerly or by CUDA graph, and commits nothing.
    /// Reruns all of them eagerly if a captured graph turns out to be out of date. For automatic sizes, replicas
    /// and ranks, both runs together are one attempt.
    pub(crate) fn attempt<B: Batch, R: IntoLoss>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        how: &AttemptSettings,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(StoreAttempt, R::Outputs), Caught<Error>> {
        let role = how.role;
        let closure = self.graphs.is_some().then(|| (how.closure)());
        let mut eager = closure.is_none();
        loop {
            let given_count = cut.given_count();
            self.begin_peak()?;
            let before = self.before()?;
            let ran = oom::catch(|| {
                let mut pass = self.begin_pass(how, eager)?;
                let borrower = Borrower::of(f);
                let streams = &self.copy_streams;
                let mut micro_batches = cut.micro_batches(batch, role, streams, borrower);
                while let Some((info, micro_batch)) = micro_batches.next()? {
                    let MicroBatchInfo { number, weight, is_trial, .. } = info;
                    // Gradients become complete in the last backward, so the exchange with other ranks can begin
                    // only then.
                    if Some(number + 1) == given_count {
                        pass.accumulator.expect_the_last();
                    }
                    let format_choice = self.format_choice.as_ref();
                    let mut ran = match (&mut self.graphs, closure) {
                        (Some(graphs), Some(closure)) => {
                            // A size that is only being tried is not worth a capture.
                            let is_steady = !is_trial;
                            let surroundings = Surroundings { format_choice, closure, is_steady };
                            graphs.run(&mut pass, micro_batch, &weight, f, &surroundings)
                        }
                        _ => {
                            let formatted = match format_choice {
                                Some(choice) => choice.of(micro_batch),
                                None => Ok(micro_batch),
                            };
                            match formatted {
                                Ok(batch) => pass.run(batch, &weight, f),
                                Err(error) => Err(error),
                            }
                            .map(|()| MicroBatchRun::PLAINLY)
                        }
                    };
                    if ran.is_ok() && self.state.non_finite == NonFinitePolicy::RefuseGradients {
                        let largest = pass.accumulator.largest();
                        let added = largest.and_then(|largest| pass.tally.add_largest(largest));
                        ran = added.and(ran);
                    }
                    micro_batches.done(ran)?;
                }
                drop(micro_batches);
                let outputs = joined(pass.outputs, cut.samples())?;
                Ok((pass.accumulator.finish()?, pass.tally, outputs))
            });
            match self.end(before, ran) {
                Err(Caught::Error(Error::OutOfDate)) if !eager => {
                    cut.restart();
                    eager = true;
                }
                ended => {
                    let ((summed, tally, outputs), undo) = ended?;
                    self.judge(&undo, cut);
                    return Ok((self.attempt_of(summed, tally, undo, role, cut), outputs));
                }
            }
        }
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
    fn begin_pass<O>(&mut self, how: &AttemptSettings, eager: bool) -> Result<BatchPass<O>> {
        let AttemptSettings { role, collective, alone, .. } = how;
        let parameters = parameters(&self.variables);
        // Within a step the format stays: the step's sums have the memory format that the parameters had at its
        // start.
        if role.begins {
            self.format_choice.as_mut().map_or(Ok(()), |choice| choice.begin(&parameters))?;
        }
        if let Some(graphs) = &mut self.graphs {
            graphs.begin(parameters.len(), &self.variables, eager)?;
        }
        let accumulator = Accumulator::begin(parameters, &self.variables)?
            .summing(collective.clone())
            .summing_others(*alone);
        let window = self.state.window.as_ref();
        let tally =
            window.map_or_else(Tally::default, |window| window.attempt.attempt.tally.following());
        Ok(BatchPass { accumulator, tally, outputs: Vec::new(), single: role.last })
    }

    /// Resets the peak memory, so that the next reading is the peak of all passes of this attempt.
    pub(super) fn begin_peak(&self) -> Result<()> {
        self.memory.as_ref().map_or(Ok(()), Memory::reset_peak)
    }

    /// Records the state before an attempt, and enters the guards under which the attempt runs.
    pub(super) fn before(&self) -> Result<Before> {
        Ok(Before {
            _inside: self.memory.as_ref().and_then(Memory::enter),
            // Recorded before the first number is drawn, so that a retry draws the same dropout masks.
            randomness: Randomness::now(self.device)?,
            unmanaged: self.unmanaged.save(&self.variables)?,
            collecting: Collecting::begin(false),
            graphs: GradMode::set(true),
        })
    }

    /// Ends an attempt: returns its result with the state to roll back to, or rolls back a failure.
    pub(super) fn end<T>(
        &mut self,
        before: Before,
        ran: Result<T, Caught<Error>>,
    ) -> Result<(T, Undo), Caught<Error>> {
        let Before { _inside, randomness, unmanaged, collecting, graphs } = before;
        drop(graphs);
        let undo = Undo { statistics: collecting.end(), randomness, unmanaged };
        match ran {
            Ok(value) => Ok((value, undo)),
            Err(caught) => {
                undo.run()?;
                // CUDA graphs keep memory that the next attempt may need, whichever module retries.
                if let (Caught::OutOfMemory(_), Some(graphs)) = (&caught, &mut self.graphs) {
                    graphs.clear()?;
                }
                Err(caught)
            }
        }
    }

    /// Learns from a part of a training step which statistics no layer reports.
    pub(super) fn judge(&mut self, undo: &Undo, cut: &Cut) {
        self.unmanaged.judge(&undo.statistics, &undo.unmanaged, cut.sizes().len());
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
