//! Waits between ranks, and how long they last. Waits show which rank hangs and which ranks only wait for it.
//! Heartbeats cannot show it, because they continue on all ranks.

use std::collections::HashMap;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Cause of a thread's wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// The rank of this number must act.
    Rank(usize),
    /// A message from or to the rank of this number is in flight; that rank may have ended since.
    Message(usize),
    /// The wait is for no other rank.
    Nobody,
}

/// Waits of this rank's threads, and waits that other ranks have reported.
#[derive(Debug)]
pub(super) struct Waits {
    rank: usize,
    pub(super) longest: Duration,
    own: HashMap<ThreadId, (usize, Instant)>,
    others: Vec<Option<usize>>,
}

impl Waits {
    pub(super) fn new(rank: usize, ranks: usize, longest: Duration) -> Self {
        Self { rank, longest, own: HashMap::new(), others: vec![None; ranks] }
    }

    /// Records that this thread waits for a rank. If it has waited for too long, returns the rank that
    /// hangs and the time.
    pub(super) fn waiting(&mut self, rank: usize, now: Instant) -> Option<(usize, Duration)> {
        let wait = self.own.entry(thread::current().id()).or_insert((rank, now));
        if wait.0 != rank {
            *wait = (rank, now);
        }
        let waited = now.saturating_duration_since(wait.1);
        (waited > self.longest).then(|| (self.hanging(rank), waited))
    }

    /// Records that this thread does not wait.
    pub(super) fn over(&mut self) {
        self.own.remove(&thread::current().id());
    }

    /// Returns the rank for which this rank has waited longest.
    pub(super) fn own(&self) -> Option<usize> {
        self.own.values().min_by_key(|(_, since)| *since).map(|(rank, _)| *rank)
    }

    /// Records the rank for which rank `from` waits.
    pub(super) fn heard(&mut self, from: usize, waits_for: Option<usize>) {
        self.others[from] = waits_for;
    }

    /// Returns the rank at the end of the chain of waits that begins at `rank`; `rank` itself if the waits form a
    /// circle.
    fn hanging(&self, rank: usize) -> usize {
        // A wait for this rank would lead back here, so it ends the chain.
        let next = |rank: &usize| self.others[*rank].filter(|next| *next != self.rank);
        let chain: Vec<usize> =
            std::iter::successors(Some(rank), next).take(self.others.len()).collect();
        match chain.last() {
            Some(last) if chain.len() < self.others.len() && next(last).is_none() => *last,
            _ => rank,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_wait_that_takes_too_long_names_the_rank_that_waits_for_nobody() {
        let (start, mut waits) = (Instant::now(), Waits::new(0, 4, 10 * SECOND));
        waits.heard(1, Some(2));
        waits.heard(2, Some(3));
        assert_eq!(waits.waiting(1, start), None);
        assert_eq!((waits.waiting(1, start + 10 * SECOND), waits.own()), (None, Some(1)));
        assert_eq!(waits.waiting(1, start + 11 * SECOND), Some((3, 11 * SECOND)));
    }

    #[test]
    fn another_rank_is_another_wait() {
        let (start, mut waits) = (Instant::now(), Waits::new(0, 3, 10 * SECOND));
        assert_eq!(waits.waiting(1, start), None);
        assert_eq!(waits.waiting(2, start + 9 * SECOND), None);
        assert_eq!(waits.waiting(2, start + 18 * SECOND), None);
        waits.over();
        assert_eq!((waits.waiting(2, start + 30 * SECOND), waits.own()), (None, Some(2)));
    }

    #[test]
    fn ranks_in_a_circle_do_not_confuse_it() {
        let (start, mut waits) = (Instant::now(), Waits::new(0, 3, SECOND));
        waits.heard(1, Some(2));
        waits.heard(2, Some(1));
        assert_eq!(waits.waiting(1, start), None);
        assert_eq!(waits.waiting(1, start + 2 * SECOND), Some((1, 2 * SECOND)));
    }
}
