//! What has been run of a step, and can still be undone.

use std::sync::{Mutex, PoisonError};

use tch::nn::Variables;

use super::attempt::Undo;
use super::cut::Cut;
use super::tally::{Group, Tally};
use crate::accumulate::Sums;
use crate::auto::Story;
use crate::bytes::Bytes;
use crate::statistics::Pending;
use crate::{Error, Result};

/// Mini-batches that have been run but not committed.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) sums: Sums,
    pub(crate) tally: Tally,
    pub(super) groups: Vec<Group>,
    pub(crate) undo: Undo,
    /// See [`crate::loss::Part::unit`].
    pub(crate) unit: f64,
    pub(crate) sizes: Vec<usize>,
    /// The most memory used while it was run.
    pub(super) peak: Bytes,
    pub(super) story: Story,
    /// For each variable that can be trained, whether it was: sums are of these, in their order.
    pub(super) trained: Vec<bool>,
}

impl Window {
    /// What was run of this cut.
    pub(super) fn new(
        sums: Sums,
        tally: Tally,
        groups: Vec<Group>,
        undo: Undo,
        unit: f64,
        cut: &Cut,
    ) -> Self {
        let (sizes, peak, story) = (cut.sizes().to_vec(), cut.peak(), Story::default());
        Self { sums, tally, groups, undo, unit, sizes, peak, story, trained: Vec::new() }
    }

    /// Takes note of what is trained, for the mini-batches that follow.
    pub(crate) fn opened(self, variables: &Mutex<Variables>) -> Self {
        Self { trained: trained(variables), ..self }
    }

    /// Refuses where other parameters are trained now than when it was opened.
    pub(crate) fn check_trained(&self, variables: &Mutex<Variables>) -> Result<()> {
        let now = trained(variables);
        if now == self.trained {
            return Ok(());
        }
        let count = |trained: &[bool]| trained.iter().filter(|trained| **trained).count();
        let samples = self.sizes.iter().sum();
        Err(Error::TrainedChanged { samples, then: count(&self.trained), now: count(&now) })
    }

    /// Makes its sums its own, so that they outlast the step; undone where there is no memory for that.
    pub(crate) fn lasting(self) -> Result<Self> {
        let Self { mut sums, undo, .. } = self;
        let (sums, undo) = undo.hold(|_| {
            sums.own()?;
            Ok(sums)
        })?;
        Ok(Self { sums, undo, ..self })
    }

    /// Brings the loss to the host, and lets `f` do the same with what else is to leave the device;
    /// undone where that fails.
    pub(crate) fn off_device<T>(
        self,
        f: impl FnOnce(&mut Pending) -> Result<T>,
    ) -> Result<(Self, T)> {
        let Self { tally, undo, .. } = self;
        let ((tally, value), undo) = undo.hold(|statistics| {
            let value = f(statistics)?;
            Ok((tally.fetched()?, value))
        })?;
        Ok((Self { tally, undo, ..self }, value))
    }

    /// Adds a later mini-batch, or another replica's part; where there is no memory for that, it is as
    /// if it had not been run.
    pub(crate) fn extend(&mut self, mut later: Self) -> Result<()> {
        let pooled = later.undo.statistics.pool();
        if let Err(error) = pooled.and_then(|()| self.tally.extend(later.tally)) {
            later.undo.run()?;
            return Err(error);
        }
        self.undo.extend(later.undo);
        self.sums.extend(later.sums)?;
        self.sizes.extend(later.sizes);
        self.peak = self.peak.max(later.peak);
        Ok(())
    }
}

/// Whether each variable that can be trained is.
fn trained(variables: &Mutex<Variables>) -> Vec<bool> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    variables.trainable_variables.iter().map(|variable| variable.tensor.requires_grad()).collect()
}
