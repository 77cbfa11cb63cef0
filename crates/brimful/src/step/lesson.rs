//! Measurements of an attempt, from which an automatic size learns, and the warnings that follow from them.

use crate::auto::{Ending, FEW_SAMPLES, Peaks};

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
