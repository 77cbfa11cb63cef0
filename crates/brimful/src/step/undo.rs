//! How to take back what a try has changed outside its gradients.

use tch::Tensor;

use super::caught::into_error_or_panic;
use crate::random::Randomness;
use crate::statistics::Pending;
use crate::{Result, oom};

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
        // Copied into place: layers hold these very tensors, and know nothing of others.
        for (mut running, before) in self.unmanaged {
            running.f_copy_(&before)?;
        }
        self.statistics.undo()
    }

    /// Runs a part of a step in which all may still fail; if it does, undoes the step. Panics go on.
    pub(crate) fn unless_done<T>(
        mut self,
        f: impl FnOnce(&mut Pending) -> Result<T>,
    ) -> Result<(T, Self)> {
        match oom::catch(|| f(&mut self.statistics)) {
            Ok(value) => Ok((value, self)),
            Err(caught) => {
                // Before a panic goes on, because nobody above can undo what is dropped on its way.
                self.run()?;
                Err(into_error_or_panic(caught))
            }
        }
    }

    /// Adds a later part of the same step, whose statistics have been pooled: what was before the
    /// first part is what counts.
    pub(crate) fn extend(&mut self, later: Self) {
        self.statistics.extend(later.statistics);
    }
}
