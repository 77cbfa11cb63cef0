//! Heartbeats of the ranks, and the detection of lost ranks.

use std::time::{Duration, Instant};

/// Time of each rank's last message.
#[derive(Debug)]
pub(super) struct Pulse {
    heard: Vec<Instant>,
    pub(super) heartbeat_timeout: Duration,
    /// Time of this rank's last check, and of its last heartbeat.
    looked: Instant,
    beaten: Instant,
}

impl Pulse {
    pub(super) fn new(ranks: usize, heartbeat_timeout: Duration, now: Instant) -> Self {
        Self { heard: vec![now; ranks], heartbeat_timeout, looked: now, beaten: now }
    }

    pub(super) fn heard(&mut self, rank: usize, now: Instant) {
        self.heard[rank] = now;
    }

    /// Returns whether a heartbeat is due; if so, it counts as sent.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        // Due after a tenth of the timeout, so that a few heartbeats may be late under load before a rank counts
        // as lost.
        let due = now.duration_since(self.beaten) >= self.heartbeat_timeout / 10;
        if due {
            self.beaten = now;
        }
        due
    }

    /// Returns the rank that was silent for longest and the time of its silence, if that exceeds the timeout.
    /// Considers only ranks for which `counts` is true.
    pub(super) fn lost(
        &mut self,
        now: Instant,
        counts: impl Fn(usize) -> bool,
    ) -> Option<(usize, Duration)> {
        let away = now.duration_since(self.looked);
        self.looked = now;
        if away > self.heartbeat_timeout / 4 {
            // This process itself did not run (a stopped job, a suspended machine): messages sent meanwhile
            // are still unread, so no rank is to blame for the gap.
            self.heard.iter_mut().for_each(|heard| *heard += away);
            return None;
        }
        let silent = self.heard.iter().enumerate().filter(|(rank, _)| counts(*rank));
        let longest = silent.min_by_key(|(_, heard)| **heard);
        let longest = longest.map(|(rank, heard)| (rank, now.saturating_duration_since(*heard)));
        longest.filter(|(_, silent)| *silent > self.heartbeat_timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Checks every second until a rank is lost; rank 1 sends a heartbeat while `beats` returns true.
    fn lost_after(seconds: u32, beats: impl Fn(u32) -> bool) -> Option<(usize, u32)> {
        let start = Instant::now();
        let mut pulse = Pulse::new(3, 10 * SECOND, start);
        (1..=seconds).find_map(|second| {
            let now = start + second * SECOND;
            pulse.heard(2, now);
            if beats(second) {
                pulse.heard(1, now);
            }
            pulse.lost(now, |rank| rank != 0).map(|(rank, _)| (rank, second))
        })
    }

    #[test]
    fn a_silent_rank_is_lost_after_the_patience_and_a_beating_one_never() {
        assert_eq!(lost_after(100, |_| true), None);
        assert_eq!(lost_after(100, |second| second % 9 == 0), None);
        assert_eq!(lost_after(100, |second| second < 20), Some((1, 30)));
    }

    #[test]
    fn who_was_stopped_itself_blames_nobody() {
        let start = Instant::now();
        let mut pulse = Pulse::new(2, 10 * SECOND, start);
        let awake = start + 3600 * SECOND;
        assert_eq!(pulse.lost(awake, |rank| rank == 1), None);
        assert_eq!(pulse.lost(awake + SECOND, |rank| rank == 1), None);
        let later = (2..20).map(|second| awake + second * SECOND);
        let lost = later.into_iter().find_map(|now| pulse.lost(now, |rank| rank == 1));
        assert_eq!(lost.map(|(rank, _)| rank), Some(1));
    }

    #[test]
    fn signs_are_given_ten_times_within_the_patience() {
        let start = Instant::now();
        let mut pulse = Pulse::new(2, 10 * SECOND, start);
        let due: Vec<bool> = (1..=8).map(|n| pulse.is_due(start + n * SECOND / 2)).collect();
        assert_eq!(due, [false, true, false, true, false, true, false, true]);
    }
}
