//! The loop over sizes: a mini-batch is run as its size says, and with an automatic one again, in
//! smaller micro-batches, where memory ran out.

use std::time::Duration;

use super::settle::Team;
use super::{Cut, Engine, Size};
use crate::auto::{
    Ending, FEW_SAMPLES, Identity, Kind, Peaks, SizeLog, SizeWatch, hash_of_variables,
};
use crate::batch::Samples;
use crate::bytes::Bytes;
use crate::{Error, Result, memory};

/// What a size can learn from a try.
#[derive(Debug)]
pub(crate) struct Lesson {
    pub(crate) peaks: Peaks,
    /// Samples in each micro-batch.
    pub(crate) sizes: Vec<usize>,
    /// Whether layers of this library normalised micro-batches, each by itself.
    pub(crate) normalised: bool,
    /// Whether work was captured for replays, which moves memory about.
    pub(crate) captured: bool,
}

/// What an engine lets the policy know before it decides.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Hints {
    /// The size is to stay while something else is measured.
    pub(crate) hold: bool,
    /// Remainders are dear: each shape is captured by itself, and keeps memory for that.
    pub(crate) even: bool,
}

/// What users are told once.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    hidden: bool,
    few: bool,
}

/// What an automatic size is to cut.
#[derive(Debug)]
pub(super) struct ToCut<'a> {
    pub(super) samples: &'a Samples,
    /// The least that a micro-batch of any rank has.
    pub(super) least: usize,
}

/// Runs a mini-batch: `run`, which also gives what a size can learn from it, is called until memory suffices
/// on all devices of all ranks in the team.
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
    // Ranks agree on a size once a try: pieces that each cuts by what it has seen would need a word
    // with all others between any two of them.
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
            // Other ranks may be about to try again: they are told before they do.
            Err(error) if ran_out => Err(error),
            Err(error) => return Err(error),
        };
    }
}

/// A size that the user has given stays as it is; once more where the engine can do with less memory.
fn run_given<E: Engine, T>(
    engine: &mut E,
    size: Size,
    to_cut: &ToCut<'_>,
    team: &Team,
    mut run: impl FnMut(&mut E, &mut Cut) -> Result<(T, Lesson)>,
) -> Result<(T, SizeLog)> {
    let mut attempt = |engine: &mut E| run(engine, &mut Cut::given(to_cut.samples.clone(), size)?);
    let error = match attempt(engine) {
        Ok((value, _)) => return Ok((value, SizeLog::default())),
        Err(error) => error,
    };
    // Over ranks all would have to agree on it. What went wrong first is what is told.
    let again = error.out_of_memory().is_some() && team.is_alone();
    if !again || !engine.make_room().unwrap_or(false) {
        return Err(error);
    }
    tracing::info!("{error}: once more, with nothing waiting on the device");
    Ok((attempt(engine)?.0, SizeLog::of_retry()))
}

/// The size at work, with all that is known of this kind of mini-batch.
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
    // BatchNorm makes gradients many times too large of a few samples that happen to agree, and Adam's
    // second moments would keep them for hundreds of steps: so the first few are not trained with.
    let rehearses = in_pieces && kind.is_training() && sizer.is_blank();
    SizeWatch::new(sizer, memories.into_iter().zip(reserved), rehearses)
}

/// What automatic sizes that are remembered hold for.
fn identity<E: Engine>(engine: &mut E) -> Result<Identity> {
    let ends = engine.memories().into_iter().map(|memory| memory::end_of(memory.as_ref()));
    // Of all devices together: with one more of them, or one less, parts are of other lengths.
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

/// One try of one size, which all ranks agree on. What keeps this rank from it is everyone's error.
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
            // The others wait for this rank's size. Who has an error of its own returns that one.
            let _ = share_size(team, Err(error.clone()));
            return Err(error);
        }
    };
    // A rank without samples has an opinion on no size, but asks and is asked all the same.
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
            let size = Size::of_units(to_cut.samples, size);
            let (value, mut lesson) = run(engine, &mut Cut::given(to_cut.samples.clone(), size)?)?;
            let peaks = std::mem::take(&mut lesson.peaks);
            Ok(((value, lesson), peaks))
        },
    );
    match refused {
        // Not a try, though memory may have run out: who told of it has returned.
        Some(error) => {
            engine.state().sizes.put(kind.clone(), watch.ended(log));
            Err(error)
        }
        None => Ok((ran, watch)),
    }
}

/// The smallest size of those that ranks with samples would take.
fn share_size(team: &Team, own: Result<Option<usize>>) -> Result<Option<usize>> {
    let sizes = team.world.settle("the micro-batch size", own, Duration::ZERO)?;
    Ok(sizes.into_iter().flatten().min())
}

/// Learns from a try. Gives the value, or none where there is to be another try. What the sizer has learnt outlives
/// a step that fails.
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
                // Graphs keep their memory for themselves, and the allocator cannot take it back: what they
                // have may be just what the next try lacks. They are captured anew later.
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

impl Warnings {
    /// Tells once what a success hides.
    fn look_at(&mut self, lesson: &Lesson, ending: Ending) {
        if ending.retried && ending.size == 1 {
            tracing::warn!(
                "the allocator emptied its cache to run a single sample: the memory is nearly full"
            );
        }
        if ending.hidden && !std::mem::replace(&mut self.hidden, true) {
            tracing::warn!(
                "memory ran out within a step that went on all the same: if the closure catches \
                 errors, let it pass out-of-memory on, because its result may be wrong"
            );
        }
        let most = lesson.sizes.iter().copied().max().unwrap_or(0);
        // A mini-batch that is small itself has no more to give, whatever fits.
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
