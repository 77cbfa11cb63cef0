//! One try at a mini-batch: run it whole, or leave everything as it was.

use std::ops::Range;
use std::panic;

use tch::Tensor;

use super::pass::Pass;
use super::replay::Surroundings;
use super::tally::{Group, Tally};
use super::{MicroBatcher, NonFinite, Outcome, Window, lengths};
use crate::accumulate::{Accumulator, Sums};
use crate::batch::{self, Batch};
use crate::loss::Part;
use crate::memory::Memory;
use crate::oom::{self, Caught};
use crate::random::Randomness;
use crate::statistics::Pending;
use crate::{Error, Result, feed};

/// A mini-batch that was run, of which nothing is committed yet.
#[derive(Debug)]
pub(super) struct Attempt<O> {
    pub(super) sums: Sums,
    pub(super) tally: Tally,
    pub(super) groups: Vec<Group>,
    pub(super) outputs: O,
    pub(super) undo: Undo,
}

/// What gradients are divided by while a mini-batch runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    /// See [`Part::unit`].
    pub(super) unit: f64,
    /// Whether that is the step's number of samples, and no other mini-batch follows.
    pub(super) last: bool,
}

impl<O> Attempt<O> {
    pub(super) fn into_window(self, unit: f64, ranges: &[Range<usize>]) -> (Window, O) {
        let Self { sums, tally, groups, outputs, undo } = self;
        (Window { sums, tally, groups, undo, unit, sizes: lengths(ranges) }, outputs)
    }
}

/// How to take back what a guarded run has changed.
#[derive(Debug)]
pub(super) struct Undo {
    pub(super) statistics: Pending,
    randomness: Randomness,
    /// Running statistics of layers that do not report, and what they were.
    foreign: Vec<(Tensor, Tensor)>,
}

impl Undo {
    /// Puts back statistics and random state.
    pub(super) fn run(self) -> Result<()> {
        self.randomness.restore()?;
        for (mut running, before) in self.foreign {
            running.f_copy_(&before)?;
        }
        self.statistics.undo()
    }

    /// Lets what was changed stand; where there is no memory for that, undoes it.
    pub(super) fn keep(mut self) -> Result<()> {
        match self.statistics.prepare() {
            Ok(moved) => moved.apply(),
            Err(error) => {
                self.run()?;
                Err(error)
            }
        }
    }

    /// Adds a later part of the same step, whose statistics have been pooled.
    pub(super) fn extend(&mut self, later: Self) {
        self.statistics.extend(later.statistics);
    }
}

impl MicroBatcher {
    /// Runs forward and backward over the micro-batches. Where that fails in an order of memory
    /// that is on trial, it is run again in the user's own.
    pub(super) fn attempt<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        ranges: &[Range<usize>],
        scale: Scale,
        mut f: impl FnMut(B) -> R,
    ) -> Result<Attempt<R::Outputs>> {
        if self.arrangement.is_on_trial() {
            match oom::catch_unseen(|| self.attempt_once(batch, ranges, scale, &mut f)) {
                Ok(attempt) => return Ok(attempt),
                Err(cause) => self.arrangement.refuse(&cause),
            }
        }
        self.attempt_once(batch, ranges, scale, &mut f)
    }

    fn attempt_once<B: Batch, R: Outcome, F: FnMut(B) -> R>(
        &mut self,
        batch: &B,
        ranges: &[Range<usize>],
        scale: Scale,
        f: &mut F,
    ) -> Result<Attempt<R::Outputs>> {
        let fresh = self.window.is_none();
        let run = |this: &mut Self| {
            let mut parameters = this.parameters();
            if fresh {
                this.arrangement.begin(&mut parameters)?;
            }
            let accumulator = Accumulator::begin(parameters)?;
            let tally =
                this.window.as_ref().map_or_else(Tally::default, |window| window.tally.following());
            let outputs = Vec::with_capacity(ranges.len());
            let mut pass = Pass { accumulator, tally, outputs, single: scale.last };
            this.replay.begin(pass.accumulator.parameters())?;
            let surroundings =
                Surroundings { arrangement: &this.arrangement, variables: &this.variables };
            feed::each(batch, ranges, this.device, |i, micro_batch| {
                let part = part(ranges, i, scale.unit, fresh);
                this.replay.run(&mut pass, micro_batch, &part, f, &surroundings)?;
                if this.non_finite == NonFinite::RefuseGradients {
                    pass.tally.add_norm(pass.accumulator.norm()?)?;
                }
                Ok(())
            })?;
            let groups = pass.groups();
            Ok((pass.accumulator.finish()?, pass.tally, groups, batch::join(pass.outputs)?))
        };
        let ((sums, tally, groups, outputs), undo) = self.guarded(ranges.len(), run)?;
        Ok(Attempt { sums, tally, groups, outputs, undo })
    }

    /// Runs `f` inside the memory; if it fails, statistics and random state are as before.
    pub(super) fn guarded<T>(
        &mut self,
        micro_batches: usize,
        f: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<(T, Undo)> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        if let Some(memory) = &self.memory {
            memory.reset_peak()?;
        }
        let randomness = Randomness::now(self.device)?;
        let foreign = self.foreign.save(&self.variables)?;
        let (statistics, result) = Pending::collect(false, || oom::catch(|| f(self)));
        let undo = Undo { statistics, randomness, foreign };
        match result {
            Ok(value) => {
                self.foreign.judge(&undo.statistics, &undo.foreign, micro_batches);
                Ok((value, undo))
            }
            Err(caught) => {
                undo.run()?;
                if matches!(caught, Caught::OutOfMemory(_)) {
                    self.replay.clear()?;
                }
                Err(match caught {
                    Caught::OutOfMemory(oom) => Error::OutOfMemory(oom),
                    Caught::Error(error) => error,
                    Caught::Panic(payload) => panic::resume_unwind(payload),
                })
            }
        }
    }
}

pub(super) fn part(ranges: &[Range<usize>], i: usize, unit: f64, fresh: bool) -> Part {
    Part { samples: ranges[i].len() as f64, unit, first: fresh && i == 0 }
}

pub(super) fn samples(ranges: &[Range<usize>]) -> f64 {
    ranges.iter().map(ExactSizeIterator::len).sum::<usize>() as f64
}
