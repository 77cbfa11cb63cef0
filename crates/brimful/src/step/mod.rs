//! The step engine: the part of a step that is common to one device, replicas and pipelines, alone or with
//! other ranks.
//!
//! ```text
//!   open      exchange samples, their kind, the seed, the trained parameters          handshake
//!   size      choose the next size to try, one for all                                sizing
//!   attempt   the engine runs every micro-batch and commits nothing                   cut, tally, undo
//!   report    exchange losses and their denominators, or the failure                  vote
//!   prepare   compute all that a commit needs, gradients and statistics of all ranks  store_attempt
//!   vote      every rank is ready, or every rank rolls back                           vote
//!   commit    put gradients and statistics in place, which needs no memory            store_attempt
//! ```
//!
//! If memory runs out before the commit, the step is rolled back and runs again with smaller micro-batches
//! ([`sizing`]). [`MicroBatcher`](crate::MicroBatcher), [`Replicas`](crate::Replicas) and
//! [`Pipeline`](crate::Pipeline) are kinds of an [`Engine`]: each defines how an attempt runs, and which
//! memories it uses.

mod cut;
mod engine;
mod error;
mod handshake;
mod parts;
mod report;
mod sizing;
mod store_attempt;
mod tally;
mod trained;
mod undo;
mod vote;
mod whole;

use std::sync::Arc;
use std::time::Instant;

use tch::Device;

pub use cut::MicroBatches;
pub(crate) use cut::{BatchRole, Cut, MicroBatchInfo, MicroBatchRun, PartSeed};
pub(crate) use engine::{Attempt, Engine, Hints, Lesson, Seeding, StepState};
pub use error::StepError;
pub(crate) use handshake::{Handshake, StepRequest, described};
pub(crate) use parts::{PartFigures, Parts, PartsEngine};
pub(crate) use report::Figures;
pub use report::{StepReport, Timeline};
pub(crate) use store_attempt::{StoreAttempt, gradient_bytes};
pub use tally::NonFinitePolicy;
pub(crate) use tally::{Counted, Tally, TermGroup, double, roots};
pub(crate) use trained::{Trained, names};
pub(crate) use undo::{Undo, UnmanagedStatistics, put_back};
pub(crate) use vote::{Exchange, Failed, ParkedPanic, PartReport, Team, Whole};
pub(crate) use whole::{RowGradients, as_leaves};

use crate::auto::{SizeLog, Use};
use crate::oom::caught;
use crate::random::{Randomness, SeedDraw};
use crate::{Error, Result};
use engine::Window;
use handshake::OwnPart;
use sizing::AttemptSizes;
use vote::LOSS;

/// One attempt at a mini-batch, as its engine receives it.
pub(crate) struct AttemptContext<'a> {
    pub(crate) cut: &'a mut Cut,
    pub(crate) handshake: &'a Handshake,
    pub(crate) exchange: &'a Exchange,
}

/// End of a mini-batch whose attempt has succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Commits the mini-batch.
    Commit,
    /// Keeps the mini-batch for [`commit`]. The report then has nothing but the outputs.
    Keep,
}

/// Runs a mini-batch at one size after the other, until an attempt fits into memory on all ranks. Then commits or
/// keeps the attempt.
pub(crate) fn run<E: Engine, O>(
    engine: &mut E,
    request: StepRequest<'_>,
    ending: Ending,
    mut run_attempt: impl FnMut(&mut E, AttemptContext<'_>) -> Result<(E::Attempt, O), Failed>,
) -> Result<StepReport<O>> {
    let start = Instant::now();
    let training = request.is_training();
    let team = match ending {
        Ending::Commit if request.used != Use::Map => engine.state().team.clone(),
        // Needs no other replica. Replicas may accumulate different numbers of mini-batches: the commit compares
        // and sums what they have.
        _ => engine.state().own_team(E::SPREADS_MODEL),
    };
    let (request, before) = match ending {
        Ending::Commit if training => (request.provided(check_no_window(engine)), None),
        Ending::Commit => (request, None),
        Ending::Keep => {
            let is_first = engine.state().window.is_none();
            let before = is_first.then(|| Randomness::now(Device::Cpu)).transpose();
            let noted = before.as_ref().map(drop).map_err(Error::clone);
            (request.provided(check_trained(engine).and(noted)), before.unwrap_or_default())
        }
    };
    // A closure's panic is an error until everything is rolled back and reported: if it unwound from here,
    // other ranks would wait for a vote that never comes.
    let mut parked = ParkedPanic::default();
    let drawn = match engine.seeding(&team) {
        Seeding::Plain => None,
        Seeding::Step(devices) => Some(SeedDraw::new(devices)),
    };
    let seed = drawn.as_ref().map(|drawn| drawn.seed.clone()).transpose();
    let done = match open(engine, &team, &request, seed) {
        Err(error) => Err(error),
        Ok(handshake) => {
            let size = engine.state().size;
            let new_sizes = |engine: &mut E| {
                let kind = || (request.kind)();
                size.is_automatic().then(|| AttemptSizes::new(engine, &handshake, &team, kind()))
            };
            let mut sizes = new_sizes(engine);
            let mut log = SizeLog::default();
            let mut fell_back = false;
            let done = loop {
                let cut = match &mut sizes {
                    Some(sizes) => sizes.next(engine),
                    None => Cut::given(handshake.own().clone(), size),
                };
                let ended = match cut {
                    Err(error) => Err(error),
                    Ok(mut cut) => {
                        // Each attempt has its own channels, so that it never reads messages that a failed attempt
                        // left in flight.
                        let ended = match team.exchange() {
                            Err(error) => Err(error),
                            Ok(exchange) => {
                                let (cut, handshake) = (&mut cut, &handshake);
                                let context =
                                    AttemptContext { cut, handshake, exchange: &exchange };
                                let ran = run_attempt(engine, context);
                                ended(engine, ran, ending, &exchange, start, &mut parked)
                            }
                        };
                        match (&mut sizes, ended.map_err(|error| engine.failed(error))) {
                            (Some(sizes), ended) => sizes.end(engine, cut, ended),
                            (None, Ok((step, _))) => Ok(Some(step)),
                            // Retries once, if the engine can free memory. With several ranks, all would have to
                            // agree on the retry.
                            (None, Err(error))
                                if log.retries == 0
                                    && team.is_alone()
                                    && error.out_of_memory().is_some()
                                    && engine.free_memory().unwrap_or(false) =>
                            {
                                tracing::info!("{error}: retrying with all activations offloaded");
                                log.retries = 1;
                                Ok(None)
                            }
                            (None, Err(error)) => Err(error),
                        }
                    }
                };
                match ended {
                    Ok(Some(step)) => {
                        let log = sizes.map_or(log, |sizes| sizes.log);
                        break Ok((step, handshake.seed(), log));
                    }
                    // A panic that another rank's earlier failure outran is not the next attempt's.
                    Ok(None) => parked = ParkedPanic::default(),
                    Err(error) if fell_back => break Err(error),
                    Err(error) => match engine.falls_back(&error) {
                        Ok(true) => {
                            fell_back = true;
                            (sizes, log) = (new_sizes(engine), SizeLog::default());
                            parked = ParkedPanic::default();
                        }
                        Ok(false) => break Err(error),
                        Err(fallback) => break Err(fallback),
                    },
                }
            };
            match fell_back {
                true => engine.end_fallback(done.is_ok()).and(done),
                false => done,
            }
        }
    };
    let done = match drawn {
        Some(drawn) => drawn.end(training, done),
        None => done,
    };
    parked.resume();
    let (step, seed, log) = done?;
    if let (Ending::Keep, Some(window)) = (ending, &mut engine.state().window) {
        window.log.extend(log);
        window.seed = window.seed.or(seed);
        window.before = window.before.take().or(before);
        return Ok(step);
    }
    if training {
        // The optimizer allocates its state before the next step, so nothing is reserved for it any more.
        engine.state().reserved.clear();
    }
    Ok(StepReport { seed, decisions: log.decisions, retries: log.retries, ..step })
}

/// Ends an attempt that has run: commits or keeps it, or reports its failure to all ranks. Also returns what an
/// automatic size learns from the attempt.
fn ended<E: Engine, O>(
    engine: &mut E,
    ran: Result<(E::Attempt, O), Failed>,
    ending: Ending,
    exchange: &Exchange,
    start: Instant,
    parked: &mut ParkedPanic,
) -> Result<(StepReport<O>, Lesson)> {
    let (attempt, outputs) =
        ran.map_err(|failed| exchange.report_failure(parked.park(failed), start))?;
    // Read first, because an attempt may be merged into others.
    let lesson = attempt.lesson();
    let step = match ending {
        Ending::Commit => finish(engine, attempt, outputs, exchange, start)?,
        Ending::Keep => keep(engine, attempt, outputs, exchange, start)?,
    };
    Ok((step, lesson))
}

/// Commits the gradients of all mini-batches since the last commit, as if they had been one.
pub(crate) fn commit<E: Engine>(engine: &mut E) -> Result<StepReport> {
    let start = Instant::now();
    let team = engine.state().team.clone();
    let window = check_trained(engine)
        .and_then(|()| engine.state().window.take().ok_or(StepError::NothingAccumulated.into()));
    let Window { attempt, log, seed, before } = match window {
        Ok(window) => window,
        Err(error) if team.is_alone() => return Err(error),
        Err(error) => {
            // The other ranks are about to vote and would wait for this rank. So this rank votes with its error,
            // and every rank rolls its window back.
            let undone = engine.state().window.take().map_or(Ok(()), |window| {
                window.attempt.undo(engine)?;
                window.before.map_or(Ok(()), |before| before.restore())
            });
            let first = team.exchange()?.report_failure(error.into(), start);
            return undone.and(Err(first));
        }
    };
    let finished = finish(engine, attempt, (), &team.exchange()?, start);
    if let (Err(_), Some(before)) = (&finished, before) {
        // The mini-batches are dropped, so the generator returns to its state before their seeds.
        before.restore()?;
    }
    let step = finished?;
    engine.state().reserved.clear();
    Ok(StepReport { seed, decisions: log.decisions, retries: log.retries, ..step })
}

/// Returns the role in the step of this process's mini-batch, or of one replica's part of it. `last` says that
/// the commit comes next.
pub(crate) fn role<E: Engine>(
    engine: &mut E,
    handshake: &Handshake,
    replica: usize,
    last: bool,
) -> BatchRole {
    let role = BatchRole { last, ..handshake.role(replica) };
    match &engine.state().window {
        // Later mini-batches keep the unit of the window's first mini-batch.
        Some(window) => {
            BatchRole { unit: window.attempt.unit(), first: false, begins: false, ..role }
        }
        None => role,
    }
}

/// Fails if an accumulation window is open: no whole step may run then.
pub(crate) fn check_no_window<E: Engine>(engine: &mut E) -> Result<()> {
    let Some(window) = &engine.state().window else { return Ok(()) };
    let samples = window.attempt.lesson().sizes.iter().sum();
    Err(StepError::WindowOpen { samples }.into())
}

fn check_trained<E: Engine>(engine: &mut E) -> Result<()> {
    // Taken out meanwhile, because the check needs the engine.
    let Some(window) = engine.state().window.take() else { return Ok(()) };
    let checked = window.attempt.check_trained(engine);
    engine.state().window = Some(window);
    checked
}

/// Opens the handshake of all ranks, then refreshes copies of shared variables if any has changed.
pub(crate) fn open<E: Engine>(
    engine: &mut E,
    team: &Team,
    request: &StepRequest<'_>,
    seed: Result<Option<u64>>,
) -> Result<Handshake> {
    // Not `?`: the other ranks wait for this rank's part, even if it is an error.
    let own = own_part(engine, team, request, seed);
    let handshake = Handshake::open(team, request, own)?;
    if handshake.changed {
        engine.refresh_copies()?;
    }
    Ok(handshake)
}

fn own_part<E: Engine>(
    engine: &mut E,
    team: &Team,
    request: &StepRequest<'_>,
    seed: Result<Option<u64>>,
) -> Result<OwnPart> {
    let seed = seed?;
    let changed = engine.begin(&request.devices)?;
    // Compared in the handshake, because gradients may be in flight when ranks report. Where nothing is summed, no
    // names are hashed.
    let compares = request.is_training() && team.replicas > 1;
    let trained = if compares { engine.trained()? } else { None };
    let rank = engine.state().team.world.rank();
    Ok(OwnPart { size: engine.state().size, seed, trained, changed, rank })
}

/// Merges an attempt into the window, and returns its outputs.
fn keep<E: Engine, O>(
    engine: &mut E,
    mut attempt: E::Attempt,
    outputs: O,
    exchange: &Exchange,
    start: Instant,
) -> Result<StepReport<O>> {
    let window = engine.state().window.take();
    let earlier = window.as_ref().map(|window| &window.attempt);
    let lasting = caught(|| attempt.detach(engine, earlier));
    if let Err(error) = exchange.report(lasting, start) {
        // Earlier mini-batches stay: the caller may run this mini-batch again, or commit without it.
        engine.state().window = window;
        attempt.undo(engine)?;
        return Err(error);
    }
    let (earlier, log, seed, before) = match window {
        Some(Window { attempt, log, seed, before }) => (Some(attempt), log, seed, before),
        None => Default::default(),
    };
    let attempt = attempt.merge(engine, earlier)?;
    engine.state().window = Some(Window { attempt, log, seed, before });
    Ok(StepReport::of_outputs(outputs))
}

/// Commits an attempt, with all ranks, and returns the step's report.
pub(crate) fn finish<E: Engine, O>(
    engine: &mut E,
    attempt: E::Attempt,
    outputs: O,
    exchange: &Exchange,
    start: Instant,
) -> Result<StepReport<O>> {
    let (attempt, whole) = commit_or_undo(engine, attempt, exchange, start)?;
    let Figures { shares, sizes, times, peaks, replayed, unmanaged_norms, timeline } =
        attempt.figures(engine, &whole)?;
    Ok(StepReport {
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

/// Commits an attempt on all ranks, or rolls it back on all.
fn commit_or_undo<E, A: Attempt<E>>(
    engine: &mut E,
    mut attempt: A,
    exchange: &Exchange,
    start: Instant,
) -> Result<(A, Arc<Whole>)> {
    match agree(engine, &mut attempt, exchange, start) {
        // From here on, nothing may fail on one rank alone, because the other ranks commit now.
        Ok(whole) => {
            attempt.commit(engine)?;
            Ok((attempt, whole))
        }
        Err(error) => {
            attempt.undo(engine)?;
            Err(error)
        }
    }
}

/// Exchanges the reports of all parts and prepares the commit; commits nothing yet.
fn agree<E, A: Attempt<E>>(
    engine: &mut E,
    attempt: &mut A,
    exchange: &Exchange,
    start: Instant,
) -> Result<Arc<Whole>> {
    // A rank that fails votes with its error: if it returned, the other ranks would wait. Hence `caught` and not
    // `?`.
    let reported = caught(|| attempt.report(engine, exchange));
    let reported = exchange.vote(LOSS, reported, start.elapsed())?;
    let whole = Arc::new(Whole::of(reported, exchange.team.replicas)?);
    // Preparing needs memory and may fail on some ranks only, so a second vote follows.
    let prepared = caught(|| attempt.prepare(engine, &whole, exchange));
    exchange.vote("the gradients", prepared, start.elapsed())?;
    Ok(whole)
}
