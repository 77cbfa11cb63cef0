//! Rollback of everything that an attempt changes outside its gradients.

use tch::Tensor;

use crate::Result;
use crate::random::Randomness;
use crate::statistics::Pending;

/// State before an attempt, to be restored.
#[derive(Debug, Default)]
pub(crate) struct Undo {
    pub(crate) statistics: Pending,
    pub(crate) randomness: Randomness,
    /// Running statistics of layers that do not report, with their values before the attempt.
    pub(crate) unmanaged: Vec<(Tensor, Tensor)>,
}

impl Undo {
    /// Restores statistics and random state.
    pub(crate) fn run(self) -> Result<()> {
        self.randomness.restore()?;
        put_back(self.unmanaged)?;
        self.statistics.undo()
    }

    /// Adds a later part of the same step, whose statistics have been pooled. The state before the first part
    /// counts.
    pub(crate) fn extend(&mut self, later: Self) {
        self.statistics.extend(later.statistics);
    }
}

/// Restores running statistics. Copied in place, because layers hold these very tensors.
pub(crate) fn put_back(statistics: Vec<(Tensor, Tensor)>) -> Result<()> {
    for (mut running, before) in statistics {
        running.f_copy_(&before)?;
    }
    Ok(())
}
