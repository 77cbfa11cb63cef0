//! What a `MicroBatcher` is asked for that runs a part of a larger step, beside others.

use std::time::Duration;

use super::layout::Arrangement;
use super::{Layout, MicroBatcher};
use crate::bytes::Bytes;
use crate::oom::catch_unseen;
use crate::{Error, Result};

impl MicroBatcher {
    pub(crate) fn set_replay(&mut self, wanted: bool) {
        self.replay.set(wanted);
    }

    pub(crate) fn set_layout(&mut self, layout: Layout) {
        self.arrangement = Arrangement::new(layout);
        if self.world.is_some() {
            self.measure_no_layout();
        }
    }

    /// Leaves the order in memory as it is, if it was to be measured: which one is faster would be
    /// another on each rank.
    pub(crate) fn measure_no_layout(&mut self) {
        if self.arrangement.is_measured() {
            self.arrangement = Arrangement::default();
        }
    }

    /// Runs `f`; where that fails in an order of memory that is on trial, again in the user's own.
    pub(crate) fn in_order<T>(&mut self, mut f: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        if self.arrangement.is_on_trial() {
            match catch_unseen(|| f(self)) {
                Ok(done) => return Ok(done),
                Err(cause) => self.arrangement.refuse(&cause),
            }
        }
        f(self)
    }

    /// Learns from a step which order in memory is the faster.
    pub(crate) fn learn_order(&mut self, samples: usize, time: Duration) {
        let new = self.replay.is_new();
        if let Some(factor) = self.arrangement.observe(samples, time, new) {
            self.sizes.rearranged(factor);
        }
    }

    /// How many micro-batches were replayed since the last call.
    pub(crate) fn take_replayed(&mut self) -> usize {
        self.replay.take_replayed()
    }

    /// The most memory in use at one moment, where it is counted, since the last call.
    pub(crate) fn take_peak(&mut self) -> Result<Option<Bytes>> {
        let Some(memory) = &self.memory else { return Ok(None) };
        let usage = memory.usage()?;
        Ok(Some(self.replay.take_peak(usage.peak)))
    }

    /// A window's sums are of the parameters that were trained when it was opened.
    pub(super) fn check_trained(&self) -> Result<()> {
        self.window.as_ref().map_or(Ok(()), |window| window.check_trained(&self.variables))
    }

    /// A whole step has no place between the parts of another.
    pub(super) fn check_no_window(&self) -> Result<()> {
        match &self.window {
            Some(window) => Err(Error::WindowOpen { samples: window.sizes.iter().sum() }),
            None => Ok(()),
        }
    }
}
