//! Runs lists of actions over channels with one place, greedily, and notes the order that comes out.
//!
//! Each tick every free device runs the most urgent of its pending actions that it can: whose input is
//! there, whose activations it may hold, whose output will find room. There will be room, too, if the
//! device at the channel's other end promises to take from it next; without promises every boundary
//! would leave a gap behind it. What comes out needs no more than one place in each channel, because
//! it was made with no more.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::super::{Action, ActionKind, DeviceId, StageId};
use super::device::{DeviceState, Rank, most_held};

/// Reorders the lists, so that none holds more activations than the list that holds the most now.
///
/// `rank` is told each action and its position in its list. The actions of one kind on one stage
/// keep their order. `None` where the limit brings everyone to a halt.
pub(in super::super) fn reorder(
    lists: &[Vec<Action>],
    rank: impl Fn(usize, Action) -> Rank,
) -> Option<Vec<Vec<Action>>> {
    ListScheduler::new(lists, rank).run()
}

struct ListScheduler {
    devices: Vec<DeviceState>,
    device_of: Vec<DeviceId>,
    /// Before each stage: boundaries and gradients.
    channels: Vec<[ChannelLoad; 2]>,
    last: StageId,
    limit: usize,
    now: u64,
    /// Who is free and has an action whose input is there.
    awake: BTreeSet<DeviceId>,
    ends: BinaryHeap<Reverse<(u64, DeviceId)>>,
}

/// What is in a channel.
#[derive(Clone, Copy, Default)]
struct ChannelLoad {
    waiting: usize,
    /// Being made, with the place taken already.
    coming: usize,
}

/// What a free device does.
enum NextMove {
    /// Runs the first action of this queue, perhaps because of a neighbour's promise.
    Start(usize, Option<Promise>),
    /// Waits for a neighbour.
    Wait,
    /// Has nothing that could be run.
    Rest,
}

/// Whether an output will find room.
enum OutputRoom {
    /// It will, perhaps because of a neighbour's promise.
    Free(Option<Promise>),
    /// The neighbour who could make room has not decided yet.
    Undecided,
    Taken,
}

/// A device will take from this queue next.
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
            // All that ends in this tick ends before anyone decides: a device that decided between
            // two ends would not see the place that the second one frees.
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

    /// Lets everyone who can start something, the last device first, so that room opens along the
    /// forwards' way. A most urgent action may get its room from a neighbour who decides later; only
    /// when nobody moves any more does somebody take a less urgent one.
    fn decide(&mut self) {
        let mut patient = self.awake.clone();
        let mut settling = self.awake.clone();
        while let Some((device, is_patient)) = next_of(&mut patient, &mut settling) {
            match self.choose(device, is_patient) {
                NextMove::Start(queue, promise) => {
                    self.start(device, queue, promise);
                    // A start takes from one channel and fills another: neighbours who had no room,
                    // or waited for this decision, decide anew.
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
        // A promise binds: somebody sends into the place that this action frees.
        if let Some(queue) = device.promised {
            return NextMove::Start(queue, None);
        }
        let mut best = (None, NextMove::Rest);
        for queue in 0..device.queues.len() {
            let Some((rank, action)) = self.ready(device, queue) else { continue };
            if best.0.is_some_and(|best| best <= rank) {
                continue;
            }
            best = match self.room(id, action, patient) {
                OutputRoom::Free(promise) => (Some(rank), NextMove::Start(queue, promise)),
                OutputRoom::Undecided => (Some(rank), NextMove::Wait),
                // Without a rank, so that any other action may still be run instead of this one.
                OutputRoom::Taken if best.0.is_none() => (None, NextMove::Wait),
                OutputRoom::Taken => best,
            };
        }
        best.1
    }

    /// A queue's next action, if all is there that it needs.
    fn ready(&self, device: &DeviceState, queue: usize) -> Option<(Rank, Action)> {
        let &(rank, action) = device.queues[queue].pending.front()?;
        let arrived = match action.source(self.last) {
            Some(_) => self.channels[action.stage.index()][action.channel()].waiting > 0,
            None => device.has_made_input(action),
        };
        let allowed = action.kind != ActionKind::Forward || device.held < self.limit;
        (arrived && allowed).then_some((rank, action))
    }

    fn room(&self, from: DeviceId, action: Action, patient: bool) -> OutputRoom {
        let Some(target) = action.target(self.last) else { return OutputRoom::Free(None) };
        let by = self.device_of[target.index()];
        let ChannelLoad { waiting, coming } = self.channels[target.index()][action.channel()];
        if by == from || waiting + coming == 0 {
            return OutputRoom::Free(None);
        }
        let neighbour = &self.devices[by.index()];
        if patient && neighbour.running.is_none() {
            return OutputRoom::Undecided;
        }
        // The output needs its place when the action ends, so a neighbour that is free by then can
        // still take what is in the way.
        let in_time = neighbour.running.is_none_or(|(_, end)| end <= self.now + ticks(action.kind));
        if coming > 0 || !in_time || neighbour.promised.is_some() {
            return OutputRoom::Taken;
        }
        match neighbour.queue(target, action.kind) {
            Some(queue) if self.can_promise(by, queue) => {
                OutputRoom::Free(Some(Promise { by, queue }))
            }
            _ => OutputRoom::Taken,
        }
    }

    /// Nothing will hinder the queue's next action once the device is free.
    fn can_promise(&self, by: DeviceId, queue: usize) -> bool {
        let device = &self.devices[by.index()];
        let Some(&(_, action)) = device.queues[queue].pending.front() else { return false };
        let released = device.running.is_some_and(|(running, _)| running.kind.releases());
        let held = device.held - usize::from(released);
        let allowed = action.kind != ActionKind::Forward || held < self.limit;
        // Only room that is there now counts: a promise must not rest on another one, which nobody
        // has given yet.
        allowed && matches!(self.room(by, action, true), OutputRoom::Free(None))
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

/// The patient before those who settle for less.
fn next_of(
    patient: &mut BTreeSet<DeviceId>,
    settling: &mut BTreeSet<DeviceId>,
) -> Option<(DeviceId, bool)> {
    let patient = patient.pop_last().map(|device| (device, true));
    patient.or_else(|| settling.pop_last().map(|device| (device, false)))
}

/// As long as in [`Costs::ticks`](super::super::Costs::ticks).
fn ticks(kind: ActionKind) -> u64 {
    if kind == ActionKind::Backward { 2 } else { 1 }
}
