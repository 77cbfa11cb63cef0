//! The loop over sizes: runs a mini-batch at its size. An automatic size reruns it in smaller micro-batches
//! where memory runs out.

use std::time::Duration;

use super::cut::Cut;
use super::engine::Engine;
use super::lesson::Lesson;
use super::micro_batches::MicroBatches;
use super::vote::Team;
use crate::auto::{Identity, Kind, SizeLog, SizeWatch, hash_of_variables};
use crate::batch::Samples;
use crate::{Error, Result, memory};
use brimful_plan::bytes::Bytes;

/// Samples that an automatic size cuts.
#[derive(Debug)]
pub(super) struct ToCut<'a> {
    pub(super) samples: &'a Samples,
    /// Smallest possible micro-batch, over all ranks.
    pub(super) least: usize,
}

/// Runs a mini-batch: calls `run`, which also returns measurements for the size policy, until it fits into
/// memory on all devices of all ranks in the team.
pub(super) fn until_it_fits<E: Engine, T>(
    engine: &mut E,
    kind: &Kind,
    to_cut: &ToCut<'_>,
    team: &Team,
    mut run: impl FnMut(&mut E, &mut Cut) -> Result<(T, Lesson)>,
) -> Result<(T, SizeLog)> {
    let size = engine.state().size;
    if !size.is_automatic() {
        return run_given(engine, size, to_cut, team, run);
    }
    // Ranks agree on a size once per attempt: if each chose piece by piece, every piece would need a
    // collective.
    let in_pieces = team.is_alone() && engine.runs_in_pieces(kind);
    let mut log = SizeLog::default();
    let mut ready = Ok(());
    loop {
        let (ran, watch) = if in_pieces {
            let watch = ready.and_then(|()| watch(engine, kind, in_pieces))?;
            let mut cut = Cut::watched(to_cut.samples.clone(), size, watch);
            let ran = run(engine, &mut cut);
            (ran, cut.into_watch().expect("it was given one"))
        } else {
            run_whole(engine, kind, to_cut, team, ready, &mut log, &mut run)?
        };
        let ran_out = matches!(&ran, Err(error) if error.out_of_memory().is_some());
        ready = match learn(engine, kind, watch, ran, &mut log) {
            Ok(Some(value)) => return Ok((value, log)),
            Ok(None) => Ok(()),
            // Other ranks may be about to rerun: they get this error first.
            Err(error) if ran_out => Err(error),
            Err(error) => return Err(error),
        };
    }
}

/// Runs a size that the user has given. If memory runs out and the engine can free some, runs it once more.
fn run_given<E: Engine, T>(
    engine: &mut E,
    size: MicroBatches,
    to_cut: &ToCut<'_>,
    team: &Team,
    mut run: impl FnMut(&mut E, &mut Cut) -> Result<(T, Lesson)>,
) -> Result<(T, SizeLog)> {
    let mut attempt = |engine: &mut E| run(engine, &mut Cut::given(to_cut.samples.clone(), size)?);
    let error = match attempt(engine) {
        Ok((value, _)) => return Ok((value, SizeLog::default())),
        Err(error) => error,
    };
    // Not over ranks, which would have to agree on it. An error of `free_memory` is ignored, because the first
    // error is the one to report.
    let again = error.out_of_memory().is_some() && team.is_alone();
    if !again || !engine.free_memory().unwrap_or(false) {
        return Err(error);
    }
    tracing::info!("{error}: retrying with all activations offloaded");
    Ok((attempt(engine)?.0, SizeLog::of_retry()))
}

/// Returns the size policy for this attempt, with the measurements of earlier mini-batches of this kind.
fn watch<E: Engine>(engine: &mut E, kind: &Kind, in_pieces: bool) -> Result<SizeWatch> {
    if let Some(path) = engine.state().remembered.take() {
        let identity = identity(engine)?;
        engine.state().sizes.remember(path, identity);
    }
    let mut sizer = match engine.state().sizes.take(kind) {
        Some(sizer) => sizer,
        None => {
            let floors = engine.floors(kind)?;
            engine.state().sizes.new_kind(kind, &floors)
        }
    };
    let hints = engine.hints();
    sizer.hold(hints.hold);
    sizer.even(hints.even);
    let memories = engine.memories();
    let captures = engine.kept_for_captures(kind)?.into_iter().chain(std::iter::repeat(0));
    let optimizer = engine.state().reserved.iter().copied().chain(std::iter::repeat(0));
    let reserved = captures.zip(optimizer).map(|(captures, optimizer)| captures + optimizer);
    // BatchNorm can make gradients far too large from a few samples that happen to agree, and Adam's second
    // moments would keep them for hundreds of steps: so the first few are not trained with.
    let rehearses = in_pieces && kind.is_training() && sizer.is_blank();
    SizeWatch::new(sizer, memories.into_iter().zip(reserved), rehearses)
}

/// Returns the cache key of remembered micro-batch sizes.
fn identity<E: Engine>(engine: &mut E) -> Result<Identity> {
    let ends = engine.memories().into_iter().map(|memory| memory::end_of(memory.as_ref()));
    // Summed over all devices: with more or fewer of them, parts have other lengths.
    let memory = ends.collect::<Result<Vec<Bytes>>>()?.into_iter().map(|end| end.0).sum();
    let variables = engine.named()?;
    let trained = variables.iter().find(|(_, tensor)| tensor.requires_grad());
    Ok(Identity {
        model: hash_of_variables(variables.iter().map(|(name, tensor)| (&**name, tensor))),
        dtype: trained.map_or("none".into(), |(_, tensor)| format!("{:?}", tensor.kind())),
        device: engine.place(),
        memory,
        goal: format!("{:?}", engine.state().size),
    })
}

/// Runs one attempt at a size that all ranks agree on. An error that keeps this rank from it becomes every
/// rank's error.
fn run_whole<E: Engine, T>(
    engine: &mut E,
    kind: &Kind,
    to_cut: &ToCut<'_>,
    team: &Team,
    ready: Result<()>,
    log: &mut SizeLog,
    run: &mut impl FnMut(&mut E, &mut Cut) -> Result<(T, Lesson)>,
) -> Result<(Result<(T, Lesson)>, SizeWatch)> {
    let planned = ready
        .and_then(|()| Ok((engine.largest_part(to_cut.samples)?, watch(engine, kind, false)?)));
    let (part, mut watch) = match planned {
        Ok(planned) => planned,
        Err(error) => {
            // The other ranks wait for this rank's size. A rank with an error of its own returns that one.
            let _ = share_size(team, Err(error.clone()));
            return Err(error);
        }
    };
    // A rank without samples proposes no size, but takes part in the exchange.
    let has_samples = to_cut.samples.count() > 0;
    let mut refused = None;
    let ran = watch.whole(
        &part,
        to_cut.least,
        |own| {
            let shared = share_size(team, Ok(has_samples.then_some(own)));
            shared
                .map(|size| size.unwrap_or(own))
                .inspect_err(|error| refused = Some(error.clone()))
        },
        |size| {
            let size = MicroBatches::of_units(to_cut.samples, size);
            let (value, mut lesson) = run(engine, &mut Cut::given(to_cut.samples.clone(), size)?)?;
            let peaks = std::mem::take(&mut lesson.peaks);
            Ok(((value, lesson), peaks))
        },
    );
    match refused {
        // Not an attempt, even if memory has run out: the rank that reported this has returned.
        Some(error) => {
            engine.state().sizes.put(kind.clone(), watch.ended(log));
            Err(error)
        }
        None => Ok((ran, watch)),
    }
}

/// Returns the smallest size that any rank with samples proposes.
fn share_size(team: &Team, own: Result<Option<usize>>) -> Result<Option<usize>> {
    let sizes = team.world.vote("the micro-batch size", own, Duration::ZERO)?;
    Ok(sizes.into_iter().flatten().min())
}

/// Learns from an attempt. Returns the value, or `None` for another attempt. The policy keeps what it has
/// learnt even if the step fails.
fn learn<E: Engine, T>(
    engine: &mut E,
    kind: &Kind,
    watch: SizeWatch,
    ran: Result<(T, Lesson)>,
    log: &mut SizeLog,
) -> Result<Option<T>> {
    let (sizer, ended) = match ran {
        Ok((value, lesson)) => {
            let (sizer, ending) = watch.succeeded(lesson.captured, log)?;
            engine.state().warnings.look_at(&lesson, ending);
            (sizer, Ok(Some(value)))
        }
        Err(Error::Rehearsed) => (watch.ended(log), Ok(None)),
        Err(error) => match error.out_of_memory().cloned() {
            Some(oom) => {
                // CUDA graphs keep their memory pools, which the allocator cannot take back: the next attempt
                // may need just that memory. Graphs are captured anew later.
                engine.drop_captures()?;
                let (sizer, ended) = watch.failed(oom, log)?;
                (sizer, ended.map(|()| None))
            }
            None => (watch.given_up(log), Err(error)),
        },
    };
    engine.state().sizes.put(kind.clone(), sizer);
    ended
}
