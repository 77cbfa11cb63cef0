//! An engine's attempt at a step, and its end: all parts report, prepare and vote, then commit or roll back.

use std::sync::Arc;
use std::time::Instant;

use super::caught::caught;
use super::lesson::Lesson;
use super::report::Figures;
use super::vote::{Exchange, LOSS, PartReport, Whole};
use crate::Result;

/// One or several mini-batches that an engine of this kind has run and not committed.
pub(crate) trait Attempt<E>: Sized {
    /// Returns a report of each of this rank's parts, for the commit of all ranks' parts.
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

    /// Returns the divisor of the gradients until the commit.
    fn unit(&self) -> f64;

    /// Returns the measurements for the size policy.
    fn lesson(&self) -> Lesson;

    /// Returns the figures for the step's report, beside the loss.
    fn figures(&self, engine: &mut E, whole: &Whole) -> Result<Figures>;
}

/// Commits an attempt on all ranks, or rolls it back on all.
pub(super) fn commit_or_undo<E, A: Attempt<E>>(
    engine: &mut E,
    mut attempt: A,
    exchange: &Exchange,
    start: Instant,
) -> Result<(A, Arc<Whole>)> {
    match agree(engine, &mut attempt, exchange, start) {
        // From here on nothing may fail on one rank alone: the others commit now.
        Ok(whole) => {
            attempt.commit(engine)?;
            Ok((attempt, whole))
        }
        Err(error) => {
            attempt.undo(engine)?;
            Err(error)
        }
    }
}

/// Exchanges the reports of all parts and prepares the commit; commits nothing yet.
fn agree<E, A: Attempt<E>>(
    engine: &mut E,
    attempt: &mut A,
    exchange: &Exchange,
    start: Instant,
) -> Result<Arc<Whole>> {
    // A rank that fails votes with its error: if it returned, the others would wait. Hence `caught` and not
    // `?`.
    let reported = caught(|| attempt.report(engine, exchange));
    let reported = exchange.vote(LOSS, reported, start.elapsed())?;
    let whole = Arc::new(Whole::of(reported, exchange.team.replicas)?);
    // Preparing needs memory and may fail on some ranks only, so a second vote follows.
    let prepared = caught(|| attempt.prepare(engine, &whole, exchange));
    exchange.vote("the gradients", prepared, start.elapsed())?;
    Ok(whole)
}
