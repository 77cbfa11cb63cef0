//! In-place ring all-reduce: every rank sends and receives about twice the tensor's size, whatever the
//! number of ranks.
//!
//! ```text
//!   n ranks, n parts; at each step a rank sends one part to the next and receives one from the previous
//!   n − 1 steps    the received part is added to the rank's own: each rank ends with one part's sum
//!   n − 1 steps    the sums go round
//! ```
//!
//! Each part is summed in one order and in one place, so that all ranks have the same bits.

use std::ops::Range;
use std::sync::Arc;

use brimful_torch::stream::Event;
use tch::Tensor;

use super::outbox::is_reached;
use crate::Result;
use brimful_plan::split;

/// All-reduce in progress.
#[derive(Debug)]
pub(super) struct Ring {
    ranks: Arc<[usize]>,
    /// Index of this rank in `ranks`.
    at: usize,
    /// One-dimensional and contiguous.
    sum: Tensor,
    /// Event after which this rank's data are complete; `None` if they already are.
    ready: Option<Event>,
    parts: Vec<Range<usize>>,
    /// Buffer for a received part that is to be added.
    scratch: Tensor,
    step: usize,
    begun: bool,
}

impl Ring {
    pub(super) fn new(
        ranks: Arc<[usize]>,
        rank: usize,
        sum: Tensor,
        ready: Option<Event>,
    ) -> Result<Self> {
        let at = ranks.iter().position(|other| *other == rank).unwrap_or(0);
        let parts = parts(sum.numel(), ranks.len())?;
        let longest = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let scratch = sum.f_narrow(0, 0, longest as i64)?.f_empty_like()?;
        Ok(Self { ranks, at, sum, ready, parts, scratch, step: 0, begun: false })
    }

    pub(super) fn is_done(&self) -> bool {
        self.step == 2 * (self.ranks.len() - 1) && !self.is_waiting()
    }

    /// Returns whether this rank's data are not complete yet.
    pub(super) fn is_waiting(&self) -> bool {
        self.ready.is_some()
    }

    /// Returns the rank that parts come from.
    pub(super) fn before(&self) -> usize {
        self.ranks[(self.at + self.ranks.len() - 1) % self.ranks.len()]
    }

    /// Returns the rank that parts go to.
    pub(super) fn after(&self) -> usize {
        self.ranks[(self.at + 1) % self.ranks.len()]
    }

    /// Returns whether this rank's data are complete.
    pub(super) fn is_ready(&mut self) -> Result<bool> {
        // Polled, not waited for: the lock is held here, and other sums may proceed.
        if !is_reached(self.ready.as_ref())? {
            return Ok(false);
        }
        self.ready = None;
        Ok(true)
    }

    /// Begins the next step. Returns the memory into which the coming part is received, and the part to send; `None`
    /// if the step has begun already.
    pub(super) fn begin_step(&mut self) -> Result<Option<(Tensor, Tensor)>> {
        if self.begun {
            return Ok(None);
        }
        let (sent, coming) = self.sent_and_coming();
        let into = if self.adds() { self.scratch_for(coming)? } else { self.part(coming)? };
        let sent = self.part(sent)?;
        self.begun = true;
        Ok(Some((into, sent)))
    }

    /// Ends a step, whose parts have been received and sent.
    pub(super) fn end_step(&mut self) -> Result<()> {
        if self.adds() {
            let (_, coming) = self.sent_and_coming();
            let _itself = self.part(coming)?.f_add_(&self.scratch_for(coming)?)?;
        }
        self.step += 1;
        self.begun = false;
        Ok(())
    }

    /// Returns whether the coming part is added: the first round sums the parts, the second distributes the sums.
    fn adds(&self) -> bool {
        self.step < self.ranks.len() - 1
    }

    /// Returns the numbers of the parts that are sent and received in this step.
    fn sent_and_coming(&self) -> (usize, usize) {
        let n = self.ranks.len();
        let sent = (self.at + 2 * n - self.step) % n;
        (sent, (sent + n - 1) % n)
    }

    fn part(&self, number: usize) -> Result<Tensor> {
        let Range { start, end } = self.parts[number];
        Ok(self.sum.f_narrow(0, start as i64, (end - start) as i64)?)
    }

    fn scratch_for(&self, number: usize) -> Result<Tensor> {
        Ok(self.scratch.f_narrow(0, 0, self.parts[number].len() as i64)?)
    }
}

/// Returns as many near-equal parts as ranks; the last parts are empty where there are too few elements.
fn parts(numbers: usize, ranks: usize) -> Result<Vec<Range<usize>>> {
    let mut parts = if numbers == 0 { Vec::new() } else { split::by_count(numbers, ranks)? };
    parts.resize(ranks, numbers..numbers);
    Ok(parts)
}
