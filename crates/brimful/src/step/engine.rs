//! Kinds of engines as a step uses them, and the state that each of them has from step to step.

use std::path::{Path, PathBuf};

use tch::{Device, Tensor};

use super::attempt::Attempt;
use super::lesson::Warnings;
use super::micro_batches::MicroBatches;
use super::tally::NonFinitePolicy;
use super::trained::Trained;
use super::vote::Team;
use crate::auto::{Goal, Kind, SizeLog, Sizes};
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

    /// Prepares for a mini-batch on these devices. Returns whether a variable has changed that other ranks hold
    /// copies of.
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
