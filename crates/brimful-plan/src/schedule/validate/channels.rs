//! Rules between stages: one order of micro-batches, and no device that waits for ever.
//!
//! Two channels connect neighbouring stages on two devices, one for boundaries and one for their gradients.
//! A device that takes from an empty channel waits, and so does one that sends into a full one. Whether
//! such a network deadlocks does not depend on the speed of the devices. So it is enough to simulate it
//! once, in any order.

use super::super::{Action, ActionKind, BlockedDevice, DeviceId, MicroBatchId, Rule, StageId};
use super::order::Order;
use super::violation::{MarkedCell, Violation};
use crate::bisect::count_while;

/// Returns the smallest capacity of the channels with which every device finishes.
pub(super) fn check(lists: &[Vec<Action>], order: &Order) -> Result<usize, Violation> {
    check_order(lists, order)?;
    // Most named schedules need a capacity of 1, and no search.
    if check_with(lists, order, 1).is_ok() {
        return Ok(1);
    }
    // A channel carries every micro-batch once: a capacity of m never makes a sender wait.
    let enough = order.micro_batches;
    check_with(lists, order, enough)?;
    // A network that finishes also finishes with more places, so the smallest capacity can be bisected.
    let is_too_small = |more: usize| check_with(lists, order, 2 + more).is_err();
    Ok(2 + count_while(enough - 2, is_too_small))
}

/// Checks that every device finishes with channels of this capacity.
pub(super) fn check_with(
    lists: &[Vec<Action>],
    order: &Order,
    capacity: usize,
) -> Result<(), Violation> {
    Network::new(lists, order, capacity).run().map_or(Ok(()), Err)
}

/// Checks that every stage takes the micro-batches in the order in which its neighbour sends them.
fn check_order(lists: &[Vec<Action>], order: &Order) -> Result<(), Violation> {
    let last = StageId::at(order.device_of.len() - 1);
    let forwards = sequences(lists, order, |kind| kind == ActionKind::Forward);
    let sequences = [forwards, sequences(lists, order, ActionKind::passes_gradient)];
    for (device, list) in lists.iter().enumerate() {
        let mut taken = vec![[0; 2]; order.device_of.len()];
        for (position, &action) in list.iter().enumerate() {
            let Some(source) = action.source(last) else { continue };
            let channel = action.channel();
            let nth = &mut taken[action.stage.index()][channel];
            let arrives = sequences[channel][source.index() * order.micro_batches + *nth];
            *nth += 1;
            if arrives != action.micro_batch {
                let rule = Rule::OutOfOrder { action, arrives };
                return Err(Violation::at(rule, DeviceId::at(device), position));
            }
        }
    }
    Ok(())
}

/// Returns the micro-batches of each stage in execution order; m for each, because the stages are complete.
fn sequences(
    lists: &[Vec<Action>],
    order: &Order,
    of: impl Fn(ActionKind) -> bool,
) -> Vec<MicroBatchId> {
    let m = order.micro_batches;
    let mut next: Vec<_> = (0..order.device_of.len()).map(|j| j * m).collect();
    let mut sequences = vec![MicroBatchId::default(); next.len() * m];
    for action in lists.iter().flatten().filter(|action| of(action.kind)) {
        let at = &mut next[action.stage.index()];
        sequences[*at] = action.micro_batch;
        *at += 1;
    }
    sequences
}

/// Running devices, and the number of boundaries in each channel that were sent and not yet taken.
struct Network<'a> {
    lists: &'a [Vec<Action>],
    device_of: &'a [DeviceId],
    last: StageId,
    capacity: usize,
    /// Number of inputs waiting before each stage: boundaries and gradients.
    waiting: Vec<[usize; 2]>,
    workers: Vec<DeviceProgress>,
    /// Devices that may be able to continue.
    awake: Vec<DeviceId>,
}

/// Progress of a device.
#[derive(Clone, Copy, Default)]
struct DeviceProgress {
    position: usize,
    /// Whether the input of the current action was taken, and only a place for its output is missing.
    has_input: bool,
}

impl<'a> Network<'a> {
    fn new(lists: &'a [Vec<Action>], order: &'a Order, capacity: usize) -> Self {
        let stages = order.device_of.len();
        Self {
            lists,
            device_of: &order.device_of,
            last: StageId::at(stages - 1),
            capacity,
            waiting: vec![[0; 2]; stages],
            workers: vec![DeviceProgress::default(); lists.len()],
            awake: (0..lists.len()).map(DeviceId::at).collect(),
        }
    }

    /// Runs until no device can continue; returns a deadlock if some have not finished.
    fn run(mut self) -> Option<Violation> {
        while let Some(device) = self.awake.pop() {
            while self.advance(device) {}
        }
        let waits: Vec<_> =
            (0..self.lists.len()).filter_map(|d| self.wait(DeviceId::at(d))).collect();
        if waits.is_empty() {
            return None;
        }
        let mark = |&BlockedDevice { device, .. }: &BlockedDevice| {
            let position = self.workers[device.index()].position;
            MarkedCell { device, position }
        };
        let marks = waits.iter().map(mark).collect();
        Some(Violation { rule: Rule::Deadlock(waits), marks })
    }

    /// Runs a device's current action, or as much of it as possible.
    fn advance(&mut self, device: DeviceId) -> bool {
        let worker = self.workers[device.index()];
        let Some(&action) = self.lists[device.index()].get(worker.position) else { return false };
        if !worker.has_input && !self.take(action) {
            return false;
        }
        if !self.send(action, device) {
            // The input stays taken, because its sender may wait for the place that it left.
            self.workers[device.index()].has_input = true;
            return false;
        }
        self.workers[device.index()] =
            DeviceProgress { position: worker.position + 1, has_input: false };
        true
    }

    fn take(&mut self, action: Action) -> bool {
        let Some(source) = action.source(self.last) else { return true };
        let waiting = &mut self.waiting[action.stage.index()][action.channel()];
        if *waiting == 0 {
            return false;
        }
        // Only a sender that waited for a place needs another visit.
        let was_full = *waiting == self.capacity;
        *waiting -= 1;
        if was_full {
            self.wake(source, action.stage);
        }
        true
    }

    fn send(&mut self, action: Action, device: DeviceId) -> bool {
        let Some(target) = action.target(self.last) else { return true };
        // On one device there is no channel, and nothing to wait for.
        let is_local = self.device_of[target.index()] == device;
        let waiting = &mut self.waiting[target.index()][action.channel()];
        if !is_local && *waiting >= self.capacity {
            return false;
        }
        *waiting += 1;
        if *waiting == 1 {
            self.wake(target, action.stage);
        }
        true
    }

    fn wake(&mut self, stage: StageId, by: StageId) {
        let device = self.device_of[stage.index()];
        if device != self.device_of[by.index()] {
            self.awake.push(device);
        }
    }

    fn wait(&self, device: DeviceId) -> Option<BlockedDevice> {
        let worker = self.workers[device.index()];
        let action = *self.lists[device.index()].get(worker.position)?;
        let neighbour =
            if worker.has_input { action.target(self.last) } else { action.source(self.last) };
        let stage = neighbour.unwrap_or(action.stage);
        Some(BlockedDevice { device, action, stage })
    }
}
