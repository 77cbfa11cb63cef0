//! Greedy list scheduler: plays actions over channels with one place, and returns the resulting order.
//!
//! At each tick every free device runs its most urgent pending action whose input has arrived, whose activations
//! it may hold, and whose output has a place. A full channel also counts as having a place if the device at its
//! other end promises to take from it next. Without promises, there would be a gap after every boundary in a
//! channel. The result needs no more than one place in each channel, because it was made with one.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::super::{Action, ActionKind, DeviceId, StageId};
use super::device::{DeviceState, Rank, most_held};

/// Reorders the lists so that none holds more activations than the present maximum.
///
/// `rank` gets each action and its position in its list. The actions of one kind on one stage keep their
/// order. Returns `None` if this limit stops all devices.
pub(in super::super) fn reorder(
    lists: &[Vec<Action>],
    rank: impl Fn(usize, Action) -> Rank,
) -> Option<Vec<Vec<Action>>> {
    ListScheduler::new(lists, rank).run()
}

struct ListScheduler {
    devices: Vec<DeviceState>,
    device_of: Vec<DeviceId>,
    /// Channels before each stage: boundaries and gradients.
    channels: Vec<[ChannelLoad; 2]>,
    last: StageId,
    limit: usize,
    now: u64,
    /// Free devices that may have an action whose input has arrived.
    awake: BTreeSet<DeviceId>,
    ends: BinaryHeap<Reverse<(u64, DeviceId)>>,
}

/// Contents of a channel.
#[derive(Clone, Copy, Default)]
struct ChannelLoad {
    waiting: usize,
    /// Number of outputs being made, whose place is taken already.
    coming: usize,
}

/// Decision of a free device.
enum NextMove {
    /// Runs the first action of this queue, if needed with a neighbour's promise.
    Start(usize, Option<Promise>),
    /// Waits for a neighbour.
    Wait,
    /// Has no action to run.
    Rest,
}

/// Availability of a place for an output.
enum OutputCapacity {
    /// There is one, if needed with a neighbour's promise.
    Free(Option<Promise>),
    /// The neighbour that could free a place has not decided yet.
    Undecided,
    Taken,
}

/// Promise of a device to take from this queue next.
struct Promise {
    by: DeviceId,
    queue: usize,
}

impl ListScheduler {
    fn new(lists: &[Vec<Action>], rank: impl Fn(usize, Action) -> Rank) -> Self {
        let stages = lists.iter().flatten().map(|a| a.stage.index() + 1).max().unwrap_or(0);
        let mut device_of = vec![DeviceId::default(); stages];
        for (d, list) in lists.iter().enumerate() {
            list.iter().for_each(|action| device_of[action.stage.index()] = DeviceId::at(d));
        }
        let mut devices: Vec<_> = lists.iter().map(|list| DeviceState::new(list, &rank)).collect();
        for (&a, &b) in device_of.iter().zip(device_of.iter().skip(1)) {
            devices[a.index()].neighbours.insert(b);
            devices[b.index()].neighbours.insert(a);
        }
        Self {
            devices,
            device_of,
            channels: vec![[ChannelLoad::default(); 2]; stages],
            last: StageId::at(stages.saturating_sub(1)),
            limit: lists.iter().map(|list| most_held(list)).max().unwrap_or(0),
            now: 0,
            awake: (0..lists.len()).map(DeviceId::at).collect(),
            ends: BinaryHeap::new(),
        }
    }

    fn run(mut self) -> Option<Vec<Vec<Action>>> {
        loop {
            self.decide();
            let Some(&Reverse((now, _))) = self.ends.peek() else { break };
            self.now = now;
            // All actions that end in this tick end before any device decides: otherwise a device would not
            // see the place that a later end frees.
            while let Some(&Reverse((end, device))) = self.ends.peek()
                && end == now
            {
                self.ends.pop();
                self.finish(device);
            }
        }
        let all_done = self.devices.iter().all(DeviceState::is_done);
        all_done.then(|| self.devices.into_iter().map(|device| device.done).collect())
    }

    /// Starts all actions that can start, the last device first, because its forward frees a place for the
    /// device before it. At first devices are patient: each waits if a neighbour that has not decided yet
    /// may free a place for its most urgent action. When no patient device starts any more, the devices also
    /// take less urgent actions.
    fn decide(&mut self) {
        let mut patient = self.awake.clone();
        let mut settling = self.awake.clone();
        while let Some((device, is_patient)) = next_of(&mut patient, &mut settling) {
            match self.choose(device, is_patient) {
                NextMove::Start(queue, promise) => {
                    self.start(device, queue, promise);
                    // A start takes from one channel and fills another: neighbours without a place, or
                    // waiting for this decision, decide again.
                    let neighbours = &self.devices[device.index()].neighbours;
                    for &neighbour in neighbours.intersection(&self.awake) {
                        patient.insert(neighbour);
                        settling.insert(neighbour);
                    }
                }
                NextMove::Wait => {}
                NextMove::Rest => {
                    self.awake.remove(&device);
                }
            }
        }
    }

    fn choose(&self, id: DeviceId, patient: bool) -> NextMove {
        let device = &self.devices[id.index()];
        if device.running.is_some() {
            return NextMove::Rest;
        }
        // A promise binds: another device sends into the place that this action frees.
        if let Some(queue) = device.promised {
            return NextMove::Start(queue, None);
        }
        let mut best = (None, NextMove::Rest);
        for queue in 0..device.queues.len() {
            let Some((rank, action)) = self.ready(device, queue) else { continue };
            if best.0.is_some_and(|best| best <= rank) {
                continue;
            }
            best = match self.capacity(id, action, patient) {
                OutputCapacity::Free(promise) => (Some(rank), NextMove::Start(queue, promise)),
                OutputCapacity::Undecided => (Some(rank), NextMove::Wait),
                // Without a rank, so that any other action may still run instead of this one.
                OutputCapacity::Taken if best.0.is_none() => (None, NextMove::Wait),
                OutputCapacity::Taken => best,
            };
        }
        best.1
    }

    /// Returns a queue's next action, if all its inputs are ready.
    fn ready(&self, device: &DeviceState, queue: usize) -> Option<(Rank, Action)> {
        let &(rank, action) = device.queues[queue].pending.front()?;
        let arrived = match action.source(self.last) {
            Some(_) => self.channels[action.stage.index()][action.channel()].waiting > 0,
            None => device.has_made_input(action),
        };
        let allowed = action.kind != ActionKind::Forward || device.held < self.limit;
        (arrived && allowed).then_some((rank, action))
    }

    fn capacity(&self, from: DeviceId, action: Action, patient: bool) -> OutputCapacity {
        let Some(target) = action.target(self.last) else { return OutputCapacity::Free(None) };
        let by = self.device_of[target.index()];
        let ChannelLoad { waiting, coming } = self.channels[target.index()][action.channel()];
        if by == from || waiting + coming == 0 {
            return OutputCapacity::Free(None);
        }
        let neighbour = &self.devices[by.index()];
        if patient && neighbour.running.is_none() {
            return OutputCapacity::Undecided;
        }
        // The output needs its place when the action ends, so a neighbour that is free by then can still
        // take the present content.
        let in_time = neighbour.running.is_none_or(|(_, end)| end <= self.now + ticks(action.kind));
        if coming > 0 || !in_time || neighbour.promised.is_some() {
            return OutputCapacity::Taken;
        }
        match neighbour.queue(target, action.kind) {
            Some(queue) if self.can_promise(by, queue) => {
                OutputCapacity::Free(Some(Promise { by, queue }))
            }
            _ => OutputCapacity::Taken,
        }
    }

    /// Returns whether the queue's next action can run as soon as the device is free.
    fn can_promise(&self, by: DeviceId, queue: usize) -> bool {
        let device = &self.devices[by.index()];
        let Some(&(_, action)) = device.queues[queue].pending.front() else { return false };
        let released = device.running.is_some_and(|(running, _)| running.kind.releases());
        let held = device.held - usize::from(released);
        let allowed = action.kind != ActionKind::Forward || held < self.limit;
        // Only present places count: a promise must not depend on another promise, which is not given yet.
        allowed && matches!(self.capacity(by, action, true), OutputCapacity::Free(None))
    }

    fn start(&mut self, id: DeviceId, queue: usize, promise: Option<Promise>) {
        if let Some(Promise { by, queue }) = promise {
            self.devices[by.index()].promised = Some(queue);
        }
        let device = &mut self.devices[id.index()];
        device.promised = None;
        let Some((_, action)) = device.queues[queue].pending.pop_front() else { return };
        let end = self.now + ticks(action.kind);
        device.running = Some((action, end));
        device.held += usize::from(action.kind == ActionKind::Forward);
        device.done.push(action);
        self.awake.remove(&id);
        self.ends.push(Reverse((end, id)));
        if action.source(self.last).is_some() {
            self.channels[action.stage.index()][action.channel()].waiting -= 1;
        }
        if let Some(target) = action.target(self.last) {
            self.channels[target.index()][action.channel()].coming += 1;
        }
    }

    fn finish(&mut self, id: DeviceId) {
        let device = &mut self.devices[id.index()];
        let Some((action, _)) = device.running.take() else { return };
        device.held -= usize::from(action.kind.releases());
        self.wake(id);
        if let Some(target) = action.target(self.last) {
            let channel = &mut self.channels[target.index()][action.channel()];
            channel.coming -= 1;
            channel.waiting += 1;
            self.wake(self.device_of[target.index()]);
        }
    }

    fn wake(&mut self, id: DeviceId) {
        if self.devices[id.index()].running.is_none() {
            self.awake.insert(id);
        }
    }
}

/// Returns the next device: the patient ones first, then those that take a less urgent action.
fn next_of(
    patient: &mut BTreeSet<DeviceId>,
    settling: &mut BTreeSet<DeviceId>,
) -> Option<(DeviceId, bool)> {
    let patient = patient.pop_last().map(|device| (device, true));
    patient.or_else(|| settling.pop_last().map(|device| (device, false)))
}

/// Returns the duration as in [`Costs::ticks`](super::super::Costs::ticks).
fn ticks(kind: ActionKind) -> u64 {
    if kind == ActionKind::Backward { 2 } else { 1 }
}
