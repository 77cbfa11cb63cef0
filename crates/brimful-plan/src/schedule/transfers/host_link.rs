//! Simulated host link: one transfer at a time in each direction, slower while both are in use.

use std::collections::VecDeque;

use super::super::HostLinkCost;
use super::Transfer;

/// Both directions of a device's host link, inward first.
pub(super) struct HostLinkClock {
    cost: HostLinkCost,
    lanes: [HostLinkLane; 2],
}

#[derive(Default)]
struct HostLinkLane {
    waiting: VecDeque<WaitingTransfer>,
    current: Option<Transit>,
}

/// Transfer that has not started.
pub(super) struct WaitingTransfer {
    pub(super) transfer: Transfer,
    pub(super) bytes: u64,
}

/// Transfer in flight.
struct Transit {
    transfer: Transfer,
    bytes: u64,
    start: f64,
    bytes_left: f64,
}

impl HostLinkClock {
    pub(super) fn new(cost: HostLinkCost) -> Self {
        Self { cost, lanes: Default::default() }
    }

    pub(super) fn queue(&mut self, waiting: WaitingTransfer) {
        let lane = usize::from(!waiting.transfer.kind.is_inward());
        self.lanes[lane].waiting.push_back(waiting);
    }

    /// Starts the next transfer in each idle direction; an inward transfer only once its data are on the host.
    pub(super) fn begin(&mut self, now: f64, is_on_host: impl Fn(Transfer) -> bool) {
        let [inward, outward] = &mut self.lanes;
        outward.begin(now);
        if inward.waiting.front().is_some_and(|next| is_on_host(next.transfer)) {
            inward.begin(now);
        }
    }

    /// Returns the time at which the next transfer ends, if no other starts before.
    pub(super) fn next_change(&self, now: f64) -> Option<f64> {
        let lanes = self.lanes.iter().zip(self.rates());
        lanes.filter_map(|(lane, rate)| lane.end(now, rate)).min_by(f64::total_cmp)
    }

    pub(super) fn advance(&mut self, now: f64, time: f64) {
        let rates = self.rates();
        self.lanes.iter_mut().zip(rates).for_each(|(lane, rate)| lane.advance(now, time, rate));
    }

    /// Returns the transfers that have arrived, with their bytes and start times.
    pub(super) fn take_ended(&mut self) -> Vec<(Transfer, u64, f64)> {
        self.lanes.iter_mut().filter_map(HostLinkLane::take_ended).collect()
    }

    /// Returns the bandwidth of each direction.
    fn rates(&self) -> [f64; 2] {
        let HostLinkCost { inward, outward, both } = self.cost;
        let are_both = self.lanes.iter().all(|lane| lane.current.is_some());
        if are_both { [both, both] } else { [inward, outward] }
    }
}

impl HostLinkLane {
    fn begin(&mut self, now: f64) {
        if self.current.is_some() {
            return;
        }
        let next = self.waiting.pop_front();
        self.current = next.map(|WaitingTransfer { transfer, bytes }| Transit {
            transfer,
            bytes,
            start: now,
            bytes_left: bytes as f64,
        });
    }

    fn end(&self, now: f64, rate: f64) -> Option<f64> {
        self.current.as_ref().map(|transit| now + transit.bytes_left / rate)
    }

    fn advance(&mut self, now: f64, time: f64, rate: f64) {
        // Compares times, not bytes: rounding would leave a rest of bytes, and an infinite rate times zero
        // time is NaN.
        let is_there = self.end(now, rate).is_some_and(|end| end <= time);
        if let Some(transit) = &mut self.current {
            transit.bytes_left =
                if is_there { 0.0 } else { transit.bytes_left - rate * (time - now) };
        }
    }

    fn take_ended(&mut self) -> Option<(Transfer, u64, f64)> {
        let ended = self.current.take_if(|transit| transit.bytes_left <= 0.0)?;
        Some((ended.transfer, ended.bytes, ended.start))
    }
}
