//! An engine's attempt at a step, and its commit or rollback.

use std::sync::Arc;

use super::report::Figures;
use super::sizing::Lesson;
use super::vote::{Exchange, PartReport, Whole};
use crate::Result;

/// One or several mini-batches that an engine of this kind has run and not committed.
pub(crate) trait Attempt<E>: Sized {
    /// Reports what is needed to commit each of this rank's parts together with the others'.
    fn report(&mut self, engine: &mut E, exchange: &Exchange) -> Result<Vec<PartReport>>;

    /// Computes all that a commit needs.
    fn prepare(&mut self, engine: &mut E, whole: &Arc<Whole>, exchange: &Exchange) -> Result<()>;

    /// Commits. Allocates nothing.
    fn commit(&mut self, engine: &mut E) -> Result<()>;

    /// Restores everything to its state before the attempt.
    fn undo(self, engine: &mut E) -> Result<()>;

    /// Detaches the attempt from memory that later steps reuse, so that it can wait for the window's commit.
    /// Fails if it does not match `earlier`.
    fn detach(&mut self, engine: &mut E, earlier: Option<&Self>) -> Result<()>;

    /// Merges a detached attempt into earlier mini-batches of the same step. Allocates nothing.
    fn merge(self, engine: &mut E, earlier: Option<Self>) -> Result<Self>;

    /// Fails if the trained parameters have changed since the sums were computed.
    fn check_trained(&self, engine: &mut E) -> Result<()>;

    /// Divisor of the gradients until the commit.
    fn unit(&self) -> f64;

    /// Measurements for the size policy.
    fn lesson(&self) -> Lesson;

    /// Figures that a step's report has beside its loss.
    fn figures(&self, engine: &mut E, whole: &Whole) -> Result<Figures>;
}
