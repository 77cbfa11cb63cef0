//! The step engine: what every kind of step has in common, on one device, on replicas, in a pipeline,
//! alone or with other ranks.
//!
//! ```text
//!   open      what all ranks bring: samples, their kind, the seed, what is trained       opening
//!   size      the next size to try, one for all                                           sizing
//!   attempt   the engine's own: every micro-batch is run, and nothing is committed   cut, tally, undo
//!   tell      losses and their denominators, or what went wrong                           settle
//!   prepare   all that a commit needs, gradients and statistics of all ranks              settle
//!   vote      everyone is ready, or everyone undoes                                       settle
//!   commit    gradients and statistics are put in place, which needs no memory            tried
//! ```
//!
//! Wherever memory runs out before the commit, all is undone and tried again, smaller ([`sizing`]).
//! [`MicroBatcher`](crate::MicroBatcher), [`Replicas`](crate::Replicas) and
//! [`Pipeline`](crate::Pipeline) are kinds of an [`Engine`]: they bring how an attempt runs, and which
//! memories it uses.

mod attempted;
mod caught;
mod cut;
mod error;
mod opening;
mod outcome;
mod parts;
mod report;
mod role;
mod settle;
mod size;
mod sizing;
mod tally;
mod trained;
mod tried;
mod undo;
mod unmanaged;
mod whole;

use std::path::{Path, PathBuf};
use std::time::Instant;

use tch::{Device, Tensor};

pub(crate) use attempted::Attempted;
pub(crate) use caught::{Failed, ParkedPanic, caught, into_error_or_panic};
pub(crate) use cut::{Cut, MicroBatchInfo, MicroBatchRun};
pub use error::StepError;
pub(crate) use opening::{Brought, Opening, described};
pub use outcome::Outcome;
pub(crate) use parts::{PartFigures, Parts, PartsEngine};
pub(crate) use report::Figures;
pub use report::{Step, Timeline};
pub(crate) use role::{BatchRole, PartSeed};
pub(crate) use settle::{Exchange, PartReport, Team, Whole};
pub use size::Size;
pub(crate) use sizing::{Hints, Lesson};
pub use tally::NonFinite;
pub(crate) use tally::{Counted, Tally, TermGroup, double, roots};
pub(crate) use trained::{Trained, names};
pub(crate) use tried::{Tried, gradient_bytes, parameters};
pub(crate) use undo::{Undo, put_back};
pub(crate) use unmanaged::UnmanagedStatistics;
pub(crate) use whole::{RowGradients, as_leaves, as_wide_as};

use crate::auto::{Goal, Kind, SizeLog, Sizes};
use crate::batch::Samples;
use crate::memory::Memory;
use crate::random::{Randomness, with_seed};
use crate::{Error, Result};
use opening::OwnPart;
use settle::settle;
use sizing::{ToCut, Warnings, until_it_fits};

/// A kind of engine, as a step sees it.
pub(crate) trait Engine: Sized {
    /// What was run of a step and is not committed.
    type Tried: Attempted<Self>;

    /// Whether the model itself is spread over ranks, so that all of them take part in every call.
    const SPREADS_MODEL: bool = false;

    /// What every kind of engine has.
    fn state(&mut self) -> &mut StepState<Self::Tried>;

    /// Where the random numbers of a step come from.
    fn seeding(&self, team: &Team) -> Seeding;

    /// Gets ready for a mini-batch on these devices. Says whether something was changed that other
    /// ranks have copies of.
    fn begin(&mut self, _devices: &[Device]) -> Result<bool> {
        Ok(false)
    }

    /// Makes copies that other ranks have the same again, on all of them or on none: see [`Engine::begin`].
    fn refresh_copies(&mut self) -> Result<()> {
        Ok(())
    }

    /// What is trained, where gradients set out to other replicas before the step's end.
    fn trained(&mut self) -> Result<Option<Trained>>;

    /// The largest part of these samples that runs by itself.
    fn largest_part(&self, samples: &Samples) -> Result<Samples> {
        Ok(samples.clone())
    }

    /// Whether a step of this kind, alone in one memory, is cut piece by piece.
    fn runs_in_pieces(&self, _kind: &Kind) -> bool {
        false
    }

    /// The memories that a step runs in; none for one that is not counted.
    fn memories(&mut self) -> Vec<Option<Memory>>;

    /// What a step of this kind needs at least in each memory.
    fn floors(&mut self, kind: &Kind) -> Result<Vec<u64>>;

    /// The model's variables, in the order of their names.
    fn named(&mut self) -> Result<Vec<(String, Tensor)>>;

    /// Where and how the model is run, in words: sizes that are remembered hold for that alone.
    fn place(&self) -> String;

    /// Bytes of each memory that captured work keeps, or will need.
    fn kept_for_captures(&mut self, _kind: &Kind) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }

    fn hints(&mut self) -> Hints {
        Hints::default()
    }

    /// Memory ran out in a step. Says whether one that is cut the same may do with less.
    fn make_room(&mut self) -> Result<bool> {
        Ok(false)
    }

    /// What a try has failed with, now that it is undone: another error where some of it cannot be, so that nobody
    /// tries again.
    fn failed(&mut self, error: Error) -> Error {
        error
    }

    /// Gives back the memory that captured work keeps.
    fn drop_captures(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Where the random numbers of a step come from.
#[derive(Debug)]
pub(crate) enum Seeding {
    /// The default generators, as in a plain loop.
    Plain,
    /// A seed of the step's own, drawn from the default generator; those of these devices are as
    /// before afterwards.
    Step(Vec<Device>),
}

/// What every kind of engine is told, and what it knows from step to step.
#[derive(Debug)]
pub(crate) struct StepState<T> {
    pub(crate) size: Size,
    pub(crate) sizes: Sizes,
    /// Bytes of each memory that an optimizer is about to take.
    pub(crate) reserved: Vec<u64>,
    pub(crate) non_finite: NonFinite,
    pub(crate) team: Team,
    pub(crate) window: Option<Window<T>>,
    pub(crate) warnings: Warnings,
    /// Where sizes are to be remembered, until that file has been read.
    remembered: Option<PathBuf>,
}

/// Mini-batches that were run and wait for their commit.
#[derive(Debug)]
pub(crate) struct Window<T> {
    pub(crate) tried: T,
    log: SizeLog,
    /// The first one's.
    seed: Option<u64>,
    /// Where the default generator stood before the first one drew its seed.
    before: Option<Randomness>,
}

impl<T> StepState<T> {
    pub(crate) fn new(size: Size) -> Self {
        Self {
            size,
            sizes: Sizes::new(goal(size)),
            reserved: Vec::new(),
            non_finite: NonFinite::default(),
            team: Team::alone(),
            window: None,
            warnings: Warnings::default(),
            remembered: None,
        }
    }

    /// Reads automatic sizes from this file before the first of them is needed.
    pub(crate) fn remember(&mut self, path: &Path) {
        self.remembered = Some(path.to_owned());
    }

    /// How mini-batches are cut from now on.
    pub(crate) fn set_size(&mut self, size: Size) {
        self.size = size;
        self.sizes.set_goal(goal(size));
    }

    /// Who takes part in what is each replica's own matter.
    fn own_team(&self, spreads_model: bool) -> Team {
        if spreads_model || self.team.is_alone() { self.team.clone() } else { Team::alone() }
    }
}

fn goal(size: Size) -> Goal {
    if size == Size::Largest { Goal::Largest } else { Goal::Fastest }
}

/// One try at a mini-batch, as its engine is told of it.
pub(crate) struct Try<'a> {
    pub(crate) cut: &'a mut Cut,
    pub(crate) opening: &'a Opening,
    pub(crate) exchange: &'a Exchange,
}

/// Runs a step over one mini-batch until memory suffices, and commits it, with all ranks.
pub(crate) fn run<E: Engine, O>(
    engine: &mut E,
    brought: Brought,
    attempt: impl FnMut(&mut E, Try<'_>) -> Result<(E::Tried, O), Failed>,
) -> Result<Step<O>> {
    let team = engine.state().team.clone();
    let brought = match brought.kind.is_training() {
        true => brought.provided(check_no_window(engine)),
        false => brought,
    };
    run_with(engine, &team, brought, attempt)
}

/// The same without gradients, as each replica's own matter; gives the outputs alone.
pub(crate) fn map<E: Engine, O>(
    engine: &mut E,
    brought: Brought,
    attempt: impl FnMut(&mut E, Try<'_>) -> Result<(E::Tried, O), Failed>,
) -> Result<O> {
    let team = engine.state().own_team(E::SPREADS_MODEL);
    Ok(run_with(engine, &team, brought, attempt)?.outputs)
}

fn run_with<E: Engine, O>(
    engine: &mut E,
    team: &Team,
    brought: Brought,
    attempt: impl FnMut(&mut E, Try<'_>) -> Result<(E::Tried, O), Failed>,
) -> Result<Step<O>> {
    let training = brought.kind.is_training();
    let (step, seed, log) = until_done(engine, team, brought, attempt, finish)?;
    if training {
        // The optimizer's state will be there before the next step.
        engine.state().reserved.clear();
    }
    Ok(Step { seed, ..step }.with_log(log))
}

/// Runs a mini-batch, and keeps the result for [`commit`]: each replica's own matter until then.
pub(crate) fn accumulate<E: Engine, O>(
    engine: &mut E,
    brought: Brought,
    attempt: impl FnMut(&mut E, Try<'_>) -> Result<(E::Tried, O), Failed>,
) -> Result<O> {
    let is_first = engine.state().window.is_none();
    let before = is_first.then(|| Randomness::now(Device::Cpu)).transpose();
    let noted = before.as_ref().map(drop).map_err(Error::clone);
    let brought = brought.provided(check_trained(engine).and(noted));
    // Replicas need not accumulate equally often: what they have is compared and summed at the commit.
    let team = engine.state().own_team(E::SPREADS_MODEL);
    let (outputs, seed, log) = until_done(engine, &team, brought, attempt, keep)?;
    let before = before?;
    if let Some(window) = &mut engine.state().window {
        window.log.extend(log);
        window.seed = window.seed.or(seed);
        window.before = window.before.take().or(before);
    }
    Ok(outputs)
}

/// Adds the gradients of all mini-batches since the last commit, as if they had been one.
pub(crate) fn commit<E: Engine>(engine: &mut E) -> Result<Step> {
    let start = Instant::now();
    let team = engine.state().team.clone();
    let window = check_trained(engine)
        .and_then(|()| engine.state().window.take().ok_or(StepError::NothingAccumulated.into()));
    let Window { tried, log, seed, before } = match window {
        Ok(window) => window,
        Err(error) if team.is_alone() => return Err(error),
        Err(error) => {
            // The other ranks are about to vote and would wait for this one: it votes too, with its
            // error, so that they undo their windows as it does.
            let undone = engine.state().window.take().map_or(Ok(()), |window| {
                window.tried.undo(engine)?;
                window.before.map_or(Ok(()), |before| before.restore())
            });
            let first = team.exchange()?.report_failure(error.into(), start);
            return undone.and(Err(first));
        }
    };
    let finished = finish(engine, tried, (), &team.exchange()?, start);
    if let (Err(_), Some(before)) = (&finished, before) {
        // The mini-batches are forgotten, and so are the seeds that they drew.
        before.restore()?;
    }
    let step = finished?;
    engine.state().reserved.clear();
    Ok(Step { seed, ..step }.with_log(log))
}

/// What this process's mini-batch, or one replica's part of it, is to a step that goes on with its
/// commit, if it is the `last`.
pub(crate) fn role<E: Engine>(
    engine: &mut E,
    opening: &Opening,
    replica: usize,
    last: bool,
) -> BatchRole {
    let role = BatchRole { last, ..opening.role(replica) };
    match &engine.state().window {
        // What follows goes on in the unit of the step's first mini-batch.
        Some(window) => {
            BatchRole { unit: window.tried.unit(), first: false, begins: false, ..role }
        }
        None => role,
    }
}

/// A whole step has no place between the parts of another.
pub(crate) fn check_no_window<E: Engine>(engine: &mut E) -> Result<()> {
    let Some(window) = &engine.state().window else { return Ok(()) };
    let samples = window.tried.lesson().sizes.iter().sum();
    Err(StepError::WindowOpen { samples }.into())
}

fn check_trained<E: Engine>(engine: &mut E) -> Result<()> {
    // Taken out for the time, because the engine is asked about it.
    let Some(window) = engine.state().window.take() else { return Ok(()) };
    let checked = window.tried.check_trained(engine);
    engine.state().window = Some(window);
    checked
}

/// Opens, and lets the engine try one size after the other, until `end` can do with what was tried
/// what it is for. Gives what that comes to, the step's seed, and what was decided about its size.
fn until_done<E: Engine, O, T>(
    engine: &mut E,
    team: &Team,
    brought: Brought,
    mut attempt: impl FnMut(&mut E, Try<'_>) -> Result<(E::Tried, O), Failed>,
    mut end: impl FnMut(&mut E, E::Tried, O, &Exchange, Instant) -> Result<T>,
) -> Result<(T, Option<u64>, SizeLog)> {
    let start = Instant::now();
    // A closure's panic is an error until everything is undone and other ranks have been told: if it
    // unwound from within, they would wait for a vote that never comes.
    let mut parked = ParkedPanic::default();
    let done = seeded(engine, team, brought.kind.is_training(), |engine, seed| {
        let opening = open(engine, team, brought, seed)?;
        let to_cut = ToCut { samples: opening.own(), least: opening.least() };
        let (value, log) = until_it_fits(engine, &opening.kind, &to_cut, team, |engine, cut| {
            // Channels of its own for every try: messages that a failed one left under way cannot be
            // taken for this one's.
            let exchange = team.exchange()?;
            let this_try = Try { cut, opening: &opening, exchange: &exchange };
            let ended = match attempt(engine, this_try) {
                Ok((tried, outputs)) => {
                    // Read before the end, which may consume what was tried.
                    let lesson = tried.lesson();
                    end(engine, tried, outputs, &exchange, start).map(|value| (value, lesson))
                }
                Err(failed) => Err(exchange.report_failure(parked.park(failed), start)),
            };
            ended.map_err(|error| engine.failed(error))
        })?;
        Ok((value, opening.seed(), log))
    });
    parked.resume();
    done
}

/// Runs `f` with the step's seed, if it has one of its own.
fn seeded<E: Engine, T>(
    engine: &mut E,
    team: &Team,
    training: bool,
    f: impl FnOnce(&mut E, Result<Option<u64>>) -> Result<T>,
) -> Result<T> {
    match engine.seeding(team) {
        Seeding::Plain => f(engine, Ok(None)),
        Seeding::Step(devices) => with_seed(devices, training, |seed| f(engine, seed.map(Some))),
    }
}

/// What all ranks bring, after which copies of shared variables are what they should be.
pub(crate) fn open<E: Engine>(
    engine: &mut E,
    team: &Team,
    brought: Brought,
    seed: Result<Option<u64>>,
) -> Result<Opening> {
    // Not `?`: the others wait for this rank's part, be it an error.
    let own = own_part(engine, team, &brought, seed);
    let opening = Opening::open(team, brought, own)?;
    if opening.changed {
        engine.refresh_copies()?;
    }
    Ok(opening)
}

fn own_part<E: Engine>(
    engine: &mut E,
    team: &Team,
    brought: &Brought,
    seed: Result<Option<u64>>,
) -> Result<OwnPart> {
    let seed = seed?;
    let changed = engine.begin(&brought.devices)?;
    // Compared here, and not with the reports, because gradients may be on their way by then; hashing
    // all names is spared where nothing is summed.
    let compares = brought.kind.is_training() && team.replicas > 1;
    let trained = if compares { engine.trained()? } else { None };
    let rank = engine.state().team.world.rank();
    Ok(OwnPart { size: engine.state().size, seed, trained, changed, rank })
}

/// Adds what was tried to the mini-batches that wait for their commit. Gives the outputs back.
fn keep<E: Engine, O>(
    engine: &mut E,
    mut tried: E::Tried,
    outputs: O,
    exchange: &Exchange,
    start: Instant,
) -> Result<O> {
    let window = engine.state().window.take();
    let earlier = window.as_ref().map(|window| &window.tried);
    let lasting = caught(|| tried.make_lasting(engine, earlier));
    if let Err(error) = exchange.report(lasting, start) {
        // Earlier mini-batches stay: the caller may bring this one again, or commit without it.
        engine.state().window = window;
        tried.undo(engine)?;
        return Err(error);
    }
    let (earlier, log, seed, before) = match window {
        Some(Window { tried, log, seed, before }) => (Some(tried), log, seed, before),
        None => Default::default(),
    };
    let tried = tried.after(engine, earlier)?;
    engine.state().window = Some(Window { tried, log, seed, before });
    Ok(outputs)
}

/// Commits what was tried, with all ranks, and reports it.
pub(crate) fn finish<E: Engine, O>(
    engine: &mut E,
    tried: E::Tried,
    outputs: O,
    exchange: &Exchange,
    start: Instant,
) -> Result<Step<O>> {
    let (tried, whole) = settle(engine, tried, exchange, start)?;
    let Figures { shares, sizes, times, peaks, replayed, unmanaged_norms, timeline } =
        tried.figures(engine, &whole)?;
    Ok(Step {
        loss: whole.totals.loss,
        terms: whole.totals.terms.clone(),
        samples: whole.samples as usize,
        shares,
        sizes,
        outputs,
        time: start.elapsed(),
        times,
        peaks,
        replayed,
        unmanaged_norms,
        seed: None,
        timeline,
        decisions: Vec::new(),
        retries: 0,
    })
}
