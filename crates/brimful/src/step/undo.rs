//! How to take back what a try has changed outside its gradients.

use tch::Tensor;

use crate::Result;
use crate::random::Randomness;
use crate::statistics::Pending;

/// What a try has changed, and what that was before.
#[derive(Debug, Default)]
pub(crate) struct Undo {
    pub(crate) statistics: Pending,
    pub(crate) randomness: Randomness,
    /// Running statistics of layers that do not report, and what they were.
    pub(crate) unmanaged: Vec<(Tensor, Tensor)>,
}

impl Undo {
    /// Puts back statistics and random state.
    pub(crate) fn run(self) -> Result<()> {
        self.randomness.restore()?;
        put_back(self.unmanaged)?;
        self.statistics.undo()
    }

    /// Adds a later part of the same step, whose statistics have been pooled: what was before the
    /// first part is what counts.
    pub(crate) fn extend(&mut self, later: Self) {
        self.statistics.extend(later.statistics);
    }
}

/// Lets running statistics be what they were. Copied into place: layers hold these very tensors, and know nothing
/// of others.
pub(crate) fn put_back(statistics: Vec<(Tensor, Tensor)>) -> Result<()> {
    for (mut running, before) in statistics {
        running.f_copy_(&before)?;
    }
    Ok(())
}
