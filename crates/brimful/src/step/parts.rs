//! What replicas of one model have run of a step, put together; one device is a single replica.

use std::time::Duration;

use super::opening::Opening;
use super::report::Figures;
use super::role::BatchRole;
use super::sizing::Lesson;
use super::tried::Tried;
use super::{Exchange, PartReport, StepState, Whole};
use crate::Result;
use crate::bytes::Bytes;
use crate::memory::Memory;

/// All replicas' parts of a mini-batch, or of several, in which nothing is committed.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) tried: Tried,
    /// None for a replica without a sample.
    pub(crate) figures: Vec<Option<PartFigures>>,
}

/// What is told of one replica's part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartFigures {
    pub(crate) samples: usize,
    pub(crate) time: Duration,
    pub(crate) peak: Option<Bytes>,
    /// Micro-batches that were replayed.
    pub(crate) replayed: usize,
    /// Whether any was captured to be replayed.
    pub(crate) captured: bool,
}

impl PartFigures {
    /// Of one mini-batch after the other.
    fn plus(self, later: Self) -> Self {
        Self {
            samples: self.samples + later.samples,
            time: self.time + later.time,
            peak: self.peak.max(later.peak),
            replayed: self.replayed + later.replayed,
            captured: self.captured || later.captured,
        }
    }
}

impl StepState<Parts> {
    /// What this process's mini-batch, or one replica's part of it, is to a step that goes on with its
    /// commit, if it is the `last`.
    pub(crate) fn role(&self, opening: &Opening, replica: usize, last: bool) -> BatchRole {
        let role = BatchRole { last, ..opening.role(replica) };
        match &self.window {
            // What follows goes on in the unit of the step's first mini-batch.
            Some(window) => BatchRole { unit: window.tried.tried.unit, first: false, ..role },
            None => role,
        }
    }

    /// See [`Engine::tell`](super::Engine::tell).
    pub(crate) fn tell(&self, parts: &mut Parts, exchange: &Exchange) -> Result<Vec<PartReport>> {
        Ok(vec![parts.tried.tell(self.non_finite, exchange.team.replicas > 1)?])
    }
}

impl Parts {
    /// See [`Engine::prepare`](super::Engine::prepare).
    pub(crate) fn prepare(&mut self, whole: &Whole, exchange: &Exchange) -> Result<()> {
        self.tried.prepare(whole, 0, exchange.summing().as_ref())
    }

    /// Adds it to earlier mini-batches.
    pub(crate) fn after(self, earlier: Option<Self>) -> Result<Self> {
        let Some(mut earlier) = earlier else { return Ok(self) };
        earlier.tried.extend(self.tried)?;
        for (before, now) in earlier.figures.iter_mut().zip(self.figures) {
            *before = match (*before, now) {
                (Some(before), Some(now)) => Some(before.plus(now)),
                (one, other) => one.or(other),
            };
        }
        Ok(earlier)
    }

    pub(crate) fn lesson(&self) -> Lesson {
        Lesson {
            peaks: self.peaks(),
            sizes: self.tried.sizes.clone(),
            normalised: self.tried.normalises(),
            captured: self.figures.iter().flatten().any(|figures| figures.captured),
        }
    }

    /// What the report of a step says of them, of which the first ran in this memory.
    pub(crate) fn report(&self, first: Option<&Memory>) -> Result<Figures> {
        let figures = || self.figures.iter();
        let mut peaks = self.peaks();
        if let (Some(memory), Some(Some(peak))) = (first, peaks.first_mut()) {
            // What a commit has needed comes on top of what its tries have.
            *peak = (*peak).max(self.tried.peak).max(memory.usage()?.peak);
        }
        Ok(Figures {
            shares: figures().map(|part| part.map_or(0, |part| part.samples)).collect(),
            sizes: self.tried.sizes.clone(),
            times: figures().map(|part| part.map(|part| part.time)).collect(),
            peaks,
            replayed: figures().flatten().map(|part| part.replayed).sum(),
            timeline: None,
        })
    }

    fn peaks(&self) -> Vec<Option<Bytes>> {
        self.figures.iter().map(|part| part.and_then(|part| part.peak)).collect()
    }
}
