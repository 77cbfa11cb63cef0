//! A bus with a clock: one move at a time in each direction, slower while both are in use.

use std::collections::VecDeque;

use super::super::BusCost;
use super::Move;

/// Both directions of a device's bus.
pub(super) struct BusClock {
    cost: BusCost,
    inward: BusLane,
    outward: BusLane,
}

#[derive(Default)]
struct BusLane {
    waiting: VecDeque<WaitingMove>,
    current: Option<Transit>,
}

/// A move that has not begun.
pub(super) struct WaitingMove {
    pub(super) moved: Move,
    pub(super) bytes: u64,
    /// When what it moves is ready.
    pub(super) ready: f64,
}

/// A move under way.
struct Transit {
    moved: Move,
    start: f64,
    bytes_left: f64,
}

impl BusClock {
    pub(super) fn new(cost: BusCost) -> Self {
        Self { cost, inward: BusLane::default(), outward: BusLane::default() }
    }

    pub(super) fn queue(&mut self, waiting: WaitingMove) {
        let inward = waiting.moved.kind.is_inward();
        let lane = if inward { &mut self.inward } else { &mut self.outward };
        lane.waiting.push_back(waiting);
    }

    /// Begins the next move in each direction that is free, where what comes in is on the host.
    pub(super) fn begin(&mut self, now: f64, is_on_host: impl Fn(Move) -> bool) {
        self.outward.begin(now);
        if self.inward.waiting.front().is_some_and(|next| is_on_host(next.moved)) {
            self.inward.begin(now);
        }
    }

    /// When the next move ends, or the next one can begin, if nothing else happens.
    pub(super) fn next_change(&self, now: f64) -> Option<f64> {
        let changes = [
            self.inward.end(now, self.inward_rate()),
            self.outward.end(now, self.outward_rate()),
            self.inward.next_ready(now),
            self.outward.next_ready(now),
        ];
        changes.into_iter().flatten().min_by(f64::total_cmp)
    }

    pub(super) fn advance(&mut self, now: f64, time: f64) {
        let inward = self.inward_rate();
        let outward = self.outward_rate();
        self.inward.advance(now, time, inward);
        self.outward.advance(now, time, outward);
    }

    /// The moves that have arrived, with their beginnings.
    pub(super) fn take_ended(&mut self) -> Vec<(Move, f64)> {
        [&mut self.inward, &mut self.outward].into_iter().filter_map(BusLane::take_ended).collect()
    }

    fn inward_rate(&self) -> f64 {
        if self.outward.current.is_some() { self.cost.both } else { self.cost.inward }
    }

    fn outward_rate(&self) -> f64 {
        if self.inward.current.is_some() { self.cost.both } else { self.cost.outward }
    }
}

impl BusLane {
    fn begin(&mut self, now: f64) {
        if self.current.is_some() {
            return;
        }
        let next = self.waiting.pop_front_if(|waiting| waiting.ready <= now);
        self.current = next.map(|WaitingMove { moved, bytes, .. }| Transit {
            moved,
            start: now,
            bytes_left: bytes as f64,
        });
    }

    fn next_ready(&self, now: f64) -> Option<f64> {
        let next = self.waiting.front().filter(|_| self.current.is_none())?;
        Some(next.ready).filter(|ready| *ready > now)
    }

    fn end(&self, now: f64, rate: f64) -> Option<f64> {
        self.current.as_ref().map(|transit| now + transit.bytes_left / rate)
    }

    fn advance(&mut self, now: f64, time: f64, rate: f64) {
        // By the time, not by the bytes: those would leave a rest by rounding, and an infinite rate
        // times no time is no number.
        let is_there = self.end(now, rate).is_some_and(|end| end <= time);
        if let Some(transit) = &mut self.current {
            transit.bytes_left =
                if is_there { 0.0 } else { transit.bytes_left - rate * (time - now) };
        }
    }

    fn take_ended(&mut self) -> Option<(Move, f64)> {
        let ended = self.current.take_if(|transit| transit.bytes_left <= 0.0)?;
        Some((ended.moved, ended.start))
    }
}
