//! Kinds of engines and their attempts as a step uses them, and the state that each engine has from step to step.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::{Device, Tensor};

use super::cut::MicroBatches;
use super::report::Figures;
use super::tally::NonFinitePolicy;
use super::trained::Trained;
use super::vote::{Exchange, PartReport, Team, Whole};
use crate::auto::{Ending, FEW_SAMPLES, Goal, Kind, Peaks, SizeLog, Sizes};
use crate::batch::Samples;
use crate::memory::Memory;
use crate::random::Randomness;
use crate::{Error, Result};

/// A kind of engine, as a step uses it.
pub(crate) trait Engine: Sized {
    /// An attempt at a step, not committed.
    type Attempt: Attempt<Self>;

    /// True if the model itself is spread over ranks, so that every call is a collective.
    const SPREADS_MODEL: bool = false;

    /// Returns the state that every kind of engine has.
    fn state(&mut self) -> &mut StepState<Self::Attempt>;

    /// Returns the source of a step's random numbers.
    fn seeding(&self, team: &Team) -> Seeding;

    /// Prepares for a mini-batch on these devices. Returns whether a variable has changed that has copies, in this
    /// rank or in others.
    fn begin(&mut self, _devices: &[Device]) -> Result<bool> {
        Ok(false)
    }

    /// Refreshes the copies of variables that other ranks own. All ranks call it, or none: see
    /// [`Engine::begin`].
    fn refresh_copies(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns the trained parameters, which the ranks compare before the step; `None` where no gradient goes to
    /// other replicas before the step's end.
    fn trained(&mut self) -> Result<Option<Trained>>;

    /// Returns the largest part of these samples that one replica runs by itself.
    fn largest_part(&self, samples: &Samples) -> Result<Samples> {
        Ok(samples.clone())
    }

    /// Returns whether a step of this kind, alone in one memory, is cut piece by piece.
    fn runs_in_pieces(&self, _kind: &Kind) -> bool {
        false
    }

    /// Returns the memories in which a step runs; `None` for one that is not counted.
    fn memories(&mut self) -> Vec<Option<Memory>>;

    /// Returns the least bytes that a step of this kind needs in each memory.
    fn floors(&mut self, kind: &Kind) -> Result<Vec<u64>>;

    /// Returns the model's variables, in the order of their names.
    fn named(&mut self) -> Result<Vec<(String, Tensor)>>;

    /// Describes device and settings of the model: part of the cache key of remembered sizes.
    fn place(&self) -> String;

    /// Returns the bytes of each memory that CUDA graphs keep, or will need.
    fn kept_for_captures(&mut self, _kind: &Kind) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }

    fn hints(&mut self) -> Hints {
        Hints::default()
    }

    /// Frees memory after a step has run out of it. Returns whether a step of the same size may now fit.
    fn free_memory(&mut self) -> Result<bool> {
        Ok(false)
    }

    /// Falls back to the user's memory format after this error, if a different format is on trial. Returns whether
    /// it falls back: then a retry may succeed.
    fn falls_back(&mut self, _error: &Error) -> Result<bool> {
        Ok(false)
    }

    /// Ends a fallback; `works` says whether the step has succeeded.
    fn end_fallback(&mut self, _works: bool) -> Result<()> {
        Ok(())
    }

    /// Returns the error of an attempt that has been rolled back; another error where the rollback itself has
    /// failed, which stops further attempts.
    fn failed(&mut self, error: Error) -> Error {
        error
    }

    /// Frees the memory that CUDA graphs keep.
    fn drop_captures(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Source of a step's random numbers.
#[derive(Debug)]
pub(crate) enum Seeding {
    /// Default generators, as in a plain loop.
    Plain,
    /// A seed for the step, drawn from the default generator; the generators of these devices are restored
    /// afterwards.
    Step(Vec<Device>),
}

/// Hints of an engine for the size policy.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Hints {
    /// Keep the size while something else is being measured.
    pub(crate) hold: bool,
    /// Avoid remainders: each shape is captured by itself, and its graph keeps memory.
    pub(crate) even: bool,
}

/// Settings of every kind of engine, and its state from step to step.
#[derive(Debug)]
pub(crate) struct StepState<T> {
    pub(crate) size: MicroBatches,
    pub(crate) sizes: Sizes,
    /// Bytes of each memory that an optimizer will allocate next.
    pub(crate) reserved: Vec<u64>,
    pub(crate) non_finite: NonFinitePolicy,
    pub(crate) team: Team,
    pub(crate) window: Option<Window<T>>,
    pub(crate) warnings: Warnings,
    /// File in which sizes are remembered, until it has been read.
    pub(super) remembered: Option<PathBuf>,
}

/// Mini-batches that wait for their commit.
#[derive(Debug)]
pub(crate) struct Window<T> {
    pub(crate) attempt: T,
    pub(super) log: SizeLog,
    /// Seed of the first mini-batch.
    pub(super) seed: Option<u64>,
    /// State of the default generator before the first mini-batch drew its seed.
    pub(super) before: Option<Randomness>,
}

impl<T> StepState<T> {
    pub(crate) fn new(size: MicroBatches) -> Self {
        Self {
            size,
            sizes: Sizes::new(goal(size)),
            reserved: Vec::new(),
            non_finite: NonFinitePolicy::default(),
            team: Team::alone(),
            window: None,
            warnings: Warnings::default(),
            remembered: None,
        }
    }

    /// Reads remembered sizes from this file before the first automatic size is chosen.
    pub(crate) fn remember(&mut self, path: &Path) {
        self.remembered = Some(path.to_owned());
    }

    /// Sets how mini-batches are cut from now on.
    pub(crate) fn set_size(&mut self, size: MicroBatches) {
        self.size = size;
        self.sizes.set_goal(goal(size));
    }

    /// Returns the team for calls that need no other replica.
    pub(super) fn own_team(&self, spreads_model: bool) -> Team {
        if spreads_model || self.team.is_alone() { self.team.clone() } else { Team::alone() }
    }
}

fn goal(size: MicroBatches) -> Goal {
    if size == MicroBatches::Largest { Goal::Largest } else { Goal::Fastest }
}

/// One or several mini-batches that an engine of this kind has run and not committed.
pub(crate) trait Attempt<E>: Sized {
    /// Returns a report of each of this rank's parts, for the commit of all ranks' parts.
    fn report(&mut self, engine: &mut E, exchange: &Exchange) -> Result<Vec<PartReport>>;

    /// Computes all that a commit needs.
    fn prepare(&mut self, engine: &mut E, whole: &Arc<Whole>, exchange: &Exchange) -> Result<()>;

    /// Commits. Allocates nothing.
    fn commit(&mut self, engine: &mut E) -> Result<()>;

    /// Restores everything to its state before the attempt.
    fn undo(self, engine: &mut E) -> Result<()>;

    /// Detaches the attempt from memory that later steps reuse, so that it can wait for the window's commit. Fails
    /// if the attempt does not match `earlier`.
    fn detach(&mut self, engine: &mut E, earlier: Option<&Self>) -> Result<()>;

    /// Merges a detached attempt into earlier mini-batches of the same step. Allocates nothing.
    fn merge(self, engine: &mut E, earlier: Option<Self>) -> Result<Self>;

    /// Fails if the trained parameters have changed since the sums were computed.
    fn check_trained(&self, engine: &mut E) -> Result<()>;

    /// Returns the divisor of the gradients until the commit.
    fn unit(&self) -> f64;

    /// Returns the measurements for the size policy.
    fn lesson(&self) -> Lesson;

    /// Returns the figures for the step's report, beside the loss.
    fn figures(&self, engine: &mut E, whole: &Whole) -> Result<Figures>;
}

/// Measurements of an attempt, from which an automatic size learns.
#[derive(Debug)]
pub(crate) struct Lesson {
    pub(crate) peaks: Peaks,
    /// Samples in each micro-batch.
    pub(crate) sizes: Vec<usize>,
    /// True if layers of this library normalised micro-batches, each by its own statistics.
    pub(crate) normalised: bool,
    /// True if a CUDA graph was captured, which changes where memory is allocated.
    pub(crate) captured: bool,
}

/// Warnings that are logged once.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    full: bool,
    hidden: bool,
    few: bool,
}

impl Warnings {
    /// Warns of problems that a successful step would hide.
    pub(super) fn look_at(&mut self, lesson: &Lesson, ending: Ending) {
        if ending.retried && ending.size == 1 && !std::mem::replace(&mut self.full, true) {
            tracing::warn!(
                "the allocator emptied its cache to run a single sample: the memory is nearly full"
            );
        }
        if ending.hidden && !std::mem::replace(&mut self.hidden, true) {
            tracing::warn!(
                "an out-of-memory error was caught inside the closure and the step went on: let the \
                 closure return out-of-memory errors, because the step's result may be wrong"
            );
        }
        let most = lesson.sizes.iter().copied().max().unwrap_or(0);
        // A small mini-batch has small micro-batches, however much memory there is.
        let is_cut = lesson.sizes.len() > 1 && lesson.sizes.iter().sum::<usize>() >= FEW_SAMPLES;
        let few = lesson.normalised && is_cut && most < FEW_SAMPLES;
        if few && !std::mem::replace(&mut self.few, true) {
            tracing::warn!(
                samples = most,
                "BatchNorm normalises each micro-batch by itself, and no more than a few samples fit: \
                 give it more memory, or use GroupNorm"
            );
        }
    }
}
