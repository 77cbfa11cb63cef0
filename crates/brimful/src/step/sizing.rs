//! Automatic sizes of a step's attempts, which get smaller if memory runs out.

use std::time::Duration;

use super::cut::{Cut, MicroBatches};
use super::engine::{Engine, Lesson};
use super::handshake::Handshake;
use super::vote::Team;
use crate::auto::{Identity, Kind, SizeLog, SizeWatch, hash_of_variables};
use crate::batch::Samples;
use crate::{Error, Result, memory};
use brimful_plan::bytes::Bytes;

/// Automatic sizes of the attempts at one mini-batch. Attempts follow each other until one fits into memory on all
/// devices of all ranks in the team.
#[derive(Debug)]
pub(super) struct AttemptSizes<'a> {
    size: MicroBatches,
    samples: &'a Samples,
    /// Smallest possible micro-batch, over all ranks.
    least: usize,
    kind: Kind,
    team: &'a Team,
    /// True if each piece of the mini-batch decides on the size of the next. Otherwise ranks agree on a size for the
    /// whole mini-batch: if each chose piece by piece, every piece would need a collective.
    in_pieces: bool,
    /// Measurements of the running attempt, if all ranks agreed on its size.
    watch: Option<SizeWatch>,
    /// Error of this rank that the other ranks do not know yet.
    failed: Option<Error>,
    pub(super) log: SizeLog,
}

impl<'a> AttemptSizes<'a> {
    pub(super) fn new<E: Engine>(
        engine: &mut E,
        handshake: &'a Handshake,
        team: &'a Team,
        kind: Kind,
    ) -> Self {
        let in_pieces = team.is_alone() && engine.runs_in_pieces(&kind);
        let (samples, least) = (handshake.own(), handshake.least());
        let (size, watch, failed, log) = (engine.state().size, None, None, SizeLog::default());
        Self { size, samples, least, kind, team, in_pieces, watch, failed, log }
    }

    /// Returns the cut of the next attempt.
    pub(super) fn next<E: Engine>(&mut self, engine: &mut E) -> Result<Cut> {
        match self.in_pieces {
            true => {
                let watch = watch(engine, &self.kind, true)?;
                Ok(Cut::watched(self.samples.clone(), self.size, watch))
            }
            false => self.agreed(engine),
        }
    }

    /// Cuts by a size that all ranks agree on. An error of this rank becomes every rank's error.
    fn agreed<E: Engine>(&mut self, engine: &mut E) -> Result<Cut> {
        let planned = self.failed.take().map_or(Ok(()), Err).and_then(|()| {
            Ok((engine.largest_part(self.samples)?, watch(engine, &self.kind, false)?))
        });
        let (part, mut watch) = match planned {
            Ok(planned) => planned,
            Err(error) => {
                // The other ranks wait for this rank's size. This rank returns its own error.
                let _ = share_size(self.team, Err(error.clone()));
                return Err(error);
            }
        };
        // A rank without samples proposes no size, but takes part in the exchange.
        let has_samples = self.samples.count() > 0;
        let own = watch.begin_whole(part, self.least);
        let size = match share_size(self.team, Ok(has_samples.then_some(own))) {
            Ok(size) => size.unwrap_or(own),
            // No attempt follows, even if memory has run out, because the rank that reported the error has
            // returned.
            Err(error) => {
                engine.state().sizes.put(self.kind.clone(), watch.ended(&mut self.log));
                return Err(error);
            }
        };
        let cut = watch.agreed(size).and_then(|()| {
            Cut::given(self.samples.clone(), MicroBatches::of_units(self.samples, size))
        });
        match cut {
            Ok(_) => self.watch = Some(watch),
            Err(_) => engine.state().sizes.put(self.kind.clone(), watch.given_up(&mut self.log)),
        }
        cut
    }

    /// Learns from an attempt. Returns its value, or `None` if another attempt must follow.
    pub(super) fn end<E: Engine, T>(
        &mut self,
        engine: &mut E,
        cut: Cut,
        mut ended: Result<(T, Lesson)>,
    ) -> Result<Option<T>> {
        let watch = cut.into_watch().or(self.watch.take());
        let mut watch = watch.expect("an automatic size is watched");
        if let Ok((_, lesson)) = &mut ended
            && let Err(error) = watch.end_whole(std::mem::take(&mut lesson.peaks))
        {
            ended = Err(error);
        }
        let ran_out = matches!(&ended, Err(error) if error.out_of_memory().is_some());
        match learn(engine, &self.kind, watch, ended, &mut self.log) {
            // Other ranks may be about to rerun the mini-batch, so they must get this error first.
            Err(error) if ran_out && !self.in_pieces => {
                self.failed = Some(error);
                Ok(None)
            }
            learnt => learnt,
        }
    }
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
    // moments would keep them for hundreds of steps: so the first few samples are only rehearsed, and rerun in
    // larger micro-batches.
    let rehearses = in_pieces && kind.is_training() && sizer.is_blank();
    SizeWatch::new(sizer, memories.into_iter().zip(reserved), rehearses)
}

/// Returns the cache key of remembered micro-batch sizes.
fn identity<E: Engine>(engine: &mut E) -> Result<Identity> {
    let ends = engine.memories().into_iter().map(|memory| memory::end_of(memory.as_ref()));
    // Summed over all devices: with a different number of devices, each device's part has a different length.
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

/// Returns the smallest size that any rank with samples proposes.
fn share_size(team: &Team, own: Result<Option<usize>>) -> Result<Option<usize>> {
    let sizes = team.world.vote("the micro-batch size", own, Duration::ZERO)?;
    Ok(sizes.into_iter().flatten().min())
}

/// Learns from an attempt. Returns the attempt's value, or `None` if another attempt must follow. The policy keeps
/// what it has learnt even if the step fails.
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
