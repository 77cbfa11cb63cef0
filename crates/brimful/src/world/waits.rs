//! Who waits for whom, and for how long: so that a rank that hangs is told from those that wait for
//! it, although all give signs of life.

use std::collections::HashMap;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// This rank is to do something.
    Rank(usize),
    /// A message of this rank is under way, which may have ended since.
    Message(usize),
    /// No other rank.
    Nobody,
}

/// The waits of this rank's threads, and those that the other ranks have told of.
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

    /// This thread waits for a rank. Where it has done so for too long, tells which rank hangs, and
    /// how long it was waited for.
    pub(super) fn waiting(&mut self, rank: usize, now: Instant) -> Option<(usize, Duration)> {
        let wait = self.own.entry(thread::current().id()).or_insert((rank, now));
        if wait.0 != rank {
            *wait = (rank, now);
        }
        let waited = now.saturating_duration_since(wait.1);
        (waited > self.longest).then(|| (self.hanging(rank), waited))
    }

    /// This thread waits for nobody.
    pub(super) fn over(&mut self) {
        self.own.remove(&thread::current().id());
    }

    /// Whom this rank has waited for the longest.
    pub(super) fn own(&self) -> Option<usize> {
        self.own.values().min_by_key(|(_, since)| *since).map(|(rank, _)| *rank)
    }

    /// Another rank has told whom it waits for.
    pub(super) fn heard(&mut self, from: usize, waits_for: Option<usize>) {
        self.others[from] = waits_for;
    }

    /// The rank at the end of those that wait for each other; this one if they wait in a circle.
    fn hanging(&self, rank: usize) -> usize {
        // Along who waits for whom; one that waits for this rank would lead back here, and ends the chain.
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
