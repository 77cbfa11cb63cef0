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

use super::message::Channel;
use super::messenger::Messenger;
use super::outbox::{OutgoingMessage, is_reached};
use crate::Result;
use brimful_plan::split;

/// All-reduce in progress.
#[derive(Debug)]
pub(super) struct Ring {
    ranks: Arc<[usize]>,
    /// Index of this rank among them.
    at: usize,
    /// One-dimensional and contiguous.
    sum: Tensor,
    /// Event after which this rank's data are complete; `None` if they are.
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

    /// Whether this rank's data are not complete yet.
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

    /// Advances as far as the received parts allow.
    pub(super) fn advance(&mut self, engine: &mut Messenger, channel: Channel) -> Result<()> {
        // Polled, not waited for: the lock is held here, and other sums may proceed.
        if !is_reached(self.ready.as_ref())? {
            return Ok(());
        }
        self.ready = None;
        let n = self.ranks.len();
        let next = self.after();
        let before = self.before();
        while !self.is_done() {
            let adds = self.step < n - 1;
            // One round to sum the parts, another to distribute the sums.
            let sent = (self.at + 2 * n - self.step) % n;
            let coming = (sent + n - 1) % n;
            if !self.begun {
                let into = if adds { self.scratch_for(coming)? } else { self.part(coming)? };
                // Received straight into place: a copy of every gradient at every step would cost time.
                let inbox = engine.inbox(before, channel);
                inbox.open(1, None);
                inbox.take_into(into);
                let part = OutgoingMessage::pack(&vec![vec![Some(self.part(sent)?)]], None)?;
                engine.send(next, channel, part)?;
                self.begun = true;
            }
            // The part being sent must not change.
            if engine.outstanding(next, channel) > 0 {
                return Ok(());
            }
            let Some(came) = engine.inbox(before, channel).take() else { return Ok(()) };
            came?;
            if adds {
                let _itself = self.part(coming)?.f_add_(&self.scratch_for(coming)?)?;
            }
            self.step += 1;
            self.begun = false;
        }
        Ok(())
    }

    fn part(&self, number: usize) -> Result<Tensor> {
        let Range { start, end } = self.parts[number];
        Ok(self.sum.f_narrow(0, start as i64, (end - start) as i64)?)
    }

    fn scratch_for(&self, number: usize) -> Result<Tensor> {
        Ok(self.scratch.f_narrow(0, 0, self.parts[number].len() as i64)?)
    }
}

/// Returns as many near-equal parts as ranks; the last ones are empty where there are too few elements.
fn parts(numbers: usize, ranks: usize) -> Result<Vec<Range<usize>>> {
    let mut parts = if numbers == 0 { Vec::new() } else { split::by_count(numbers, ranks)? };
    parts.resize(ranks, numbers..numbers);
    Ok(parts)
}
