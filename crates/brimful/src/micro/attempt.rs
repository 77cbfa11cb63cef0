//! One try at a mini-batch: run it whole, or leave everything as it was.

use std::ops::Range;
use std::panic;

use tch::Tensor;

use super::tally::{Group, Tally};
use super::{MicroBatcher, NonFinite, Outcome, Window, lengths};
use crate::accumulate::{Accumulator, Sums};
use crate::batch::{self, Batch};
use crate::loss::{Part, Term};
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
pub(crate) struct Undo {
    pub(crate) statistics: Pending,
    pub(crate) randomness: Randomness,
    /// Running statistics of layers that do not report, and what they were.
    pub(crate) foreign: Vec<(Tensor, Tensor)>,
}

impl Undo {
    /// Puts back statistics and random state.
    pub(crate) fn run(self) -> Result<()> {
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
    /// Runs forward and backward over the micro-batches.
    pub(super) fn attempt<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        ranges: &[Range<usize>],
        scale: Scale,
        mut f: impl FnMut(B) -> R,
    ) -> Result<Attempt<R::Outputs>> {
        let fresh = self.window.is_none();
        let run = |this: &Self| {
            let mut accumulator = Accumulator::begin(this.parameters())?;
            let mut tally =
                this.window.as_ref().map_or_else(Tally::default, |window| window.tally.following());
            let mut outputs = Vec::with_capacity(ranges.len());
            feed::each(batch, ranges, this.device, |i, micro_batch| {
                let (loss, output) = f(micro_batch).into_parts()?;
                let terms = loss.into_terms(true)?;
                let part = part(ranges, i, scale.unit, fresh);
                tally.count(&terms, &part)?;
                add(&mut accumulator, &terms, &part, &tally.groups(scale.last))?;
                if this.non_finite == NonFinite::RefuseGradients {
                    tally.add_norm(accumulator.norm()?)?;
                }
                outputs.push(output.map(&mut |leaf| Ok(leaf.tensor().f_detach()?))?);
                Ok(())
            })?;
            let groups = tally.groups(scale.last);
            Ok((accumulator.finish()?, tally, groups, batch::join(outputs)?))
        };
        let ((sums, tally, groups, outputs), undo) = self.guarded(ranges.len(), run)?;
        Ok(Attempt { sums, tally, groups, outputs, undo })
    }

    /// Runs `f` inside the memory; if it fails, statistics and random state are as before.
    pub(super) fn guarded<T>(
        &mut self,
        micro_batches: usize,
        f: impl FnOnce(&Self) -> Result<T>,
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
                Err(match caught {
                    Caught::OutOfMemory(oom) => Error::OutOfMemory(oom),
                    Caught::Error(error) => error,
                    Caught::Panic(payload) => panic::resume_unwind(payload),
                })
            }
        }
    }
}

/// Runs each group's terms backward; the graph is kept until the last.
fn add(accumulator: &mut Accumulator, terms: &[Term], part: &Part, groups: &[Group]) -> Result<()> {
    let distinct = distinct(groups);
    accumulator.expect_groups(distinct.len());
    let mut work = Vec::new();
    for (index, group) in distinct.iter().enumerate() {
        let mut roots = Vec::new();
        for (term, _) in terms.iter().zip(groups).filter(|(_, own)| *own == group) {
            roots.extend(term.root_gradient(part)?.map(|gradient| (&term.value, gradient)));
        }
        if !roots.is_empty() {
            work.push((index, roots));
        }
    }
    let last = work.len().saturating_sub(1);
    for (k, (index, roots)) in work.iter().enumerate() {
        accumulator.add(*index, roots, k < last)?;
    }
    Ok(())
}

/// The groups, each once, in the order of their first terms.
pub(crate) fn distinct(groups: &[Group]) -> Vec<Group> {
    let mut seen = Vec::new();
    for group in groups {
        if !seen.contains(group) {
            seen.push(*group);
        }
    }
    seen
}

pub(crate) fn part(ranges: &[Range<usize>], i: usize, unit: f64, fresh: bool) -> Part {
    Part { samples: ranges[i].len() as f64, unit, first: fresh && i == 0 }
}

pub(crate) fn samples(ranges: &[Range<usize>]) -> f64 {
    ranges.iter().map(ExactSizeIterator::len).sum::<usize>() as f64
}
