//! What an engine has tried of a step, and what becomes of it.

use std::sync::Arc;

use super::report::Figures;
use super::settle::{Exchange, PartReport, Whole};
use super::sizing::Lesson;
use crate::Result;

/// A mini-batch that an engine of this kind has run, or several, of which nothing is committed.
pub(crate) trait Attempted<E>: Sized {
    /// What has to be known of each of this rank's parts to commit them together.
    fn tell(&mut self, engine: &mut E, exchange: &Exchange) -> Result<Vec<PartReport>>;

    /// Computes all that a commit needs.
    fn prepare(&mut self, engine: &mut E, whole: &Arc<Whole>, exchange: &Exchange) -> Result<()>;

    /// Lets it stand. Nothing is allocated.
    fn commit(&mut self, engine: &mut E) -> Result<()>;

    /// Leaves everything as it was before.
    fn undo(self, engine: &mut E) -> Result<()>;

    /// Makes it ready to wait beside earlier mini-batches of the same step, if it fits to them.
    fn make_lasting(&mut self, engine: &mut E, earlier: Option<&Self>) -> Result<()>;

    /// Adds what was made lasting to earlier mini-batches of the same step. Nothing is allocated.
    fn after(self, engine: &mut E, earlier: Option<Self>) -> Result<Self>;

    /// Refuses where other parameters are trained now than those that the sums are of.
    fn check_trained(&self, engine: &mut E) -> Result<()>;

    /// What gradients are divided by until the commit.
    fn unit(&self) -> f64;

    /// What the size is to learn from it.
    fn lesson(&self) -> Lesson;

    /// What the report of a step says beside its loss.
    fn figures(&self, engine: &mut E, whole: &Whole) -> Result<Figures>;
}
