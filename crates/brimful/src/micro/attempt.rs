//! One try at a mini-batch: run it whole, or leave everything as it was.

use std::any::type_name;
use std::panic;

use tch::{Device, Tensor};

use super::cut::{Cut, Place};
use super::pass::Pass;
use super::replay::{Closure, Surroundings};
use super::tally::Tally;
use super::{MicroBatcher, NonFinite, Outcome, Window};
use crate::accumulate::Accumulator;
use crate::batch::{self, Batch};
use crate::loss::Part;
use crate::memory::Memory;
use crate::oom::{self, Caught};
use crate::random::{Dice, Draws, Randomness};
use crate::ranks::RanksTurn;
use crate::statistics::Pending;
use crate::world::WorldError;
use crate::{Error, Result};

/// A mini-batch's place in its step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    /// What gradients are divided by while it runs: see [`Part::unit`].
    pub(crate) unit: f64,
    /// Whether it has the step's first sample.
    pub(crate) first: bool,
    /// Whether the unit is the step's number of samples, and no other mini-batch follows.
    pub(crate) last: bool,
    /// Random numbers of its own; without them it draws as a plain loop does.
    pub(crate) draws: Option<OwnDraws>,
}

/// The random numbers of one replica or rank in one step, which belong to its micro-batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnDraws {
    pub(crate) seed: u64,
    /// Which replica or rank.
    pub(crate) place: usize,
}

impl OwnDraws {
    /// What its micro-batches draw from on this device, while it lives.
    pub(super) fn on(self, device: Device) -> OwnDice {
        OwnDice { draws: self, dice: Dice::new(device) }
    }
}

/// The generator of one replica or rank in one step.
pub(super) struct OwnDice {
    draws: OwnDraws,
    dice: Dice,
}

impl OwnDice {
    /// Lets the micro-batch draw from its own seed.
    pub(super) fn begin(&self, micro_batch: usize) {
        let OwnDraws { seed, place } = self.draws;
        self.dice.seed(Draws::new(seed, micro_batch).seed(place));
    }
}

impl Scale {
    /// Of a mini-batch that is a step of its own.
    pub(super) fn whole(cut: &Cut) -> Self {
        Self { unit: cut.samples() as f64, first: true, last: true, draws: None }
    }
}

/// How a try runs its micro-batches.
#[derive(Debug)]
struct How {
    closure: Closure,
    /// Whether nothing is to be replayed.
    eager: bool,
    /// In which gradients are to be added up over the ranks.
    turn: Option<RanksTurn>,
}

/// How to take back what a guarded run has changed.
#[derive(Debug, Default)]
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
    pub(super) fn keep(self) -> Result<()> {
        self.settle(|statistics| statistics.prepare()?.apply())
    }

    /// Runs the last part of a step, in which all may still fail; if it does, undoes the step.
    pub(super) fn settle<T>(self, f: impl FnOnce(&mut Pending) -> Result<T>) -> Result<T> {
        self.hold(f).map(|(value, _)| value)
    }

    /// Runs a part of a step that comes before its last, in which all may fail as well.
    pub(crate) fn hold<T>(
        mut self,
        f: impl FnOnce(&mut Pending) -> Result<T>,
    ) -> Result<(T, Self)> {
        match oom::catch(|| f(&mut self.statistics)) {
            Ok(value) => Ok((value, self)),
            Err(caught) => {
                self.run()?;
                Err(uncaught(caught))
            }
        }
    }

    /// Adds a later part of the same step, whose statistics have been pooled.
    pub(super) fn extend(&mut self, later: Self) {
        self.statistics.extend(later.statistics);
    }
}

impl MicroBatcher {
    /// Runs forward and backward over the micro-batches; once more, and eagerly, where captured work
    /// turned out to be out of date. Nothing is committed yet.
    pub(crate) fn attempt<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        scale: Scale,
        closure: Closure,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(Window, R::Outputs)> {
        let turn = self.turn.take();
        let mut how = How { closure, eager: false, turn: turn.clone() };
        match self.attempt_once(batch, cut, scale, how, f) {
            Err(Error::OutOfDate) => {
                cut.restart();
                how = How { closure, eager: true, turn };
                self.attempt_once(batch, cut, scale, how, f)
            }
            ended => ended,
        }
    }

    fn attempt_once<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        scale: Scale,
        how: How,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(Window, R::Outputs)> {
        let How { closure, eager, turn } = how;
        let run = |this: &mut Self, cut: &mut Cut| {
            let mut parameters = this.parameters();
            if scale.first {
                this.arrangement.begin(&mut parameters)?;
            }
            this.replay.begin(parameters.len(), &this.variables, eager)?;
            let accumulator = Accumulator::begin(parameters, &this.variables)?.summing(turn);
            let tally =
                this.window.as_ref().map_or_else(Tally::default, |window| window.tally.following());
            let mut pass = Pass { accumulator, tally, outputs: Vec::new(), single: scale.last };
            let surroundings = Surroundings { arrangement: &this.arrangement, closure };
            let dice = scale.draws.map(|draws| draws.on(this.device));
            let micro_batches = cut.given_count();
            cut.each(batch, &this.copies, |place, micro_batch| {
                let Place { number: i, samples, tried } = place;
                let (samples, first) = (samples as f64, scale.first && i == 0);
                let part = Part { samples, unit: scale.unit, first };
                if let Some(dice) = &dice {
                    dice.begin(i);
                }
                if Some(i + 1) == micro_batches {
                    pass.accumulator.expect_the_last();
                }
                let settled = !tried;
                let ran =
                    this.replay.run(&mut pass, micro_batch, &part, f, &surroundings, settled)?;
                if this.non_finite == NonFinite::RefuseGradients {
                    pass.tally.add_norm(pass.accumulator.norm()?)?;
                }
                Ok(ran)
            })?;
            let groups = pass.groups();
            let outputs = joined(pass.outputs)?;
            Ok((pass.accumulator.finish()?, pass.tally, groups, outputs))
        };
        let ((sums, tally, groups, outputs), undo) = self.trained(cut, run)?;
        Ok((Window::new(sums, tally, groups, undo, scale.unit, cut), outputs))
    }

    /// Runs a part of a training step as [`MicroBatcher::guarded`] does.
    pub(super) fn trained<T>(
        &mut self,
        cut: &mut Cut,
        f: impl FnOnce(&mut Self, &mut Cut) -> Result<T>,
    ) -> Result<(T, Undo)> {
        let (value, undo) = self.guarded(cut, f)?;
        self.foreign.judge(&undo.statistics, &undo.foreign, cut.sizes().len());
        if cut.given_count().is_none() {
            self.foreign.warn_of_few(&undo.statistics, cut.sizes());
        }
        Ok((value, undo))
    }

    /// Runs `f` inside the memory; if it fails, statistics and random state are as before.
    pub(super) fn guarded<T>(
        &mut self,
        cut: &mut Cut,
        f: impl FnOnce(&mut Self, &mut Cut) -> Result<T>,
    ) -> Result<(T, Undo)> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        if let Some(memory) = &self.memory {
            memory.reset_peak()?;
        }
        let randomness = Randomness::now(self.device)?;
        let foreign = self.foreign.save(&self.variables)?;
        let (statistics, result) = Pending::collect(false, || oom::catch(|| f(self, cut)));
        let undo = Undo { statistics, randomness, foreign };
        match result {
            Ok(value) => Ok((value, undo)),
            Err(caught) => {
                undo.run()?;
                if matches!(caught, Caught::OutOfMemory(_)) {
                    self.replay.clear()?;
                }
                Err(uncaught(caught))
            }
        }
    }
}

/// The error; a panic that is not out-of-memory goes on.
pub(crate) fn uncaught(caught: Caught<Error>) -> Error {
    match caught {
        Caught::OutOfMemory(oom) => Error::OutOfMemory(oom),
        Caught::Error(error) => error,
        Caught::Panic(payload) => panic::resume_unwind(payload),
    }
}

/// The outputs of all micro-batches; those of a rank without a sample are blank.
pub(super) fn joined<O: Batch>(outputs: Vec<O>) -> Result<O> {
    if !outputs.is_empty() {
        return batch::join(outputs);
    }
    O::blank().ok_or_else(|| WorldError::NoForm { name: type_name::<O>().into() }.into())
}
