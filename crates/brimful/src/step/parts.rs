//! Parts of a step that replicas of one model have run; one device is a single replica.

use std::sync::Arc;
use std::time::Duration;

use brimful_torch::arena::ArenaGuard;

use super::engine::{Attempt, Engine, Lesson};
use super::report::Figures;
use super::store_attempt::StoreAttempt;
use super::vote::{Exchange, PartReport, Whole};
use crate::Result;
use crate::memory::Memory;
use brimful_plan::bytes::Bytes;

/// Parts that all replicas have run of one or several mini-batches, not committed.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) attempt: StoreAttempt,
    /// `None` for a replica without a sample.
    pub(crate) figures: Vec<Option<PartFigures>>,
}

/// Figures of one replica's part, for the step's report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartFigures {
    pub(crate) samples: usize,
    pub(crate) time: Duration,
    pub(crate) peak: Option<Bytes>,
    /// Micro-batches that were replayed.
    pub(crate) replayed: usize,
    /// True if any micro-batch was captured as a CUDA graph.
    pub(crate) captured: bool,
    /// Number of BatchNorm layers that are not this library's.
    pub(crate) unmanaged_norms: usize,
}

impl PartFigures {
    /// Adds the figures of a later mini-batch.
    fn plus(self, later: Self) -> Self {
        Self {
            samples: self.samples + later.samples,
            time: self.time + later.time,
            peak: self.peak.max(later.peak),
            replayed: self.replayed + later.replayed,
            captured: self.captured || later.captured,
            unmanaged_norms: self.unmanaged_norms.max(later.unmanaged_norms),
        }
    }
}

/// An engine on one device or on replicas, each of which has the whole model.
pub(crate) trait PartsEngine: Engine<Attempt = Parts> {
    /// Returns the memory in which sums are prepared and committed: the first replica's.
    fn main_memory(&self) -> Option<Memory>;
}

/// Enters the first replica's memory, so that this work is charged to it: the calling thread may belong to no
/// replica.
fn enter_host_arena(engine: &impl PartsEngine) -> Option<ArenaGuard> {
    engine.main_memory().and_then(|main_memory| main_memory.enter())
}

impl<E: PartsEngine> Attempt<E> for Parts {
    fn report(&mut self, engine: &mut E, exchange: &Exchange) -> Result<Vec<PartReport>> {
        let _inside = enter_host_arena(engine);
        let policy = engine.state().non_finite;
        Ok(vec![self.attempt.report(policy, exchange.team.replicas > 1)?])
    }

    fn prepare(&mut self, engine: &mut E, whole: &Arc<Whole>, exchange: &Exchange) -> Result<()> {
        let _inside = enter_host_arena(engine);
        self.attempt.sum_up(whole, 0, exchange.summing().as_ref())?;
        self.attempt.cast()?;
        self.attempt.check_finite(engine.state().non_finite)
    }

    fn commit(&mut self, _engine: &mut E) -> Result<()> {
        self.attempt.commit()
    }

    fn undo(self, _engine: &mut E) -> Result<()> {
        self.attempt.undo.run()
    }

    fn detach(&mut self, engine: &mut E, earlier: Option<&Self>) -> Result<()> {
        let _inside = enter_host_arena(engine);
        self.attempt.detach(earlier.map(|earlier| &earlier.attempt))
    }

    fn merge(self, _engine: &mut E, earlier: Option<Self>) -> Result<Self> {
        let Some(mut earlier) = earlier else { return Ok(self) };
        earlier.attempt.extend(self.attempt)?;
        for (before, now) in earlier.figures.iter_mut().zip(self.figures) {
            *before = match (*before, now) {
                (Some(before), Some(now)) => Some(before.plus(now)),
                (one, other) => one.or(other),
            };
        }
        Ok(earlier)
    }

    fn check_trained(&self, _engine: &mut E) -> Result<()> {
        self.attempt.check_trained()
    }

    fn unit(&self) -> f64 {
        self.attempt.unit
    }

    fn lesson(&self) -> Lesson {
        Lesson {
            peaks: self.peaks(),
            sizes: self.attempt.sizes.clone(),
            normalised: self.attempt.normalises(),
            captured: self.figures.iter().flatten().any(|figures| figures.captured),
        }
    }

    fn figures(&self, engine: &mut E, _whole: &Whole) -> Result<Figures> {
        let figures = || self.figures.iter();
        let mut peaks = self.peaks();
        if let (Some(main_memory), Some(Some(peak))) = (engine.main_memory(), peaks.first_mut()) {
            // A commit may need more than its attempts.
            *peak = (*peak).max(self.attempt.peak).max(main_memory.usage()?.peak);
        }
        Ok(Figures {
            shares: figures().map(|part| part.map_or(0, |part| part.samples)).collect(),
            sizes: self.attempt.sizes.clone(),
            times: figures().map(|part| part.map(|part| part.time)).collect(),
            peaks,
            replayed: figures().flatten().map(|part| part.replayed).sum(),
            // Replicas have the same layers.
            unmanaged_norms: figures()
                .flatten()
                .map(|part| part.unmanaged_norms)
                .max()
                .unwrap_or(0),
            timeline: None,
        })
    }
}

impl Parts {
    fn peaks(&self) -> Vec<Option<Bytes>> {
        self.figures.iter().map(|part| part.and_then(|part| part.peak)).collect()
    }
}
