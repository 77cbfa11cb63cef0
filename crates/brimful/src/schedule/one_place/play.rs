//! Plays lists of wishes over channels with one place, and notes what each device did.
//!
//! Each tick every free device runs the first of its wishes that it can: whose input is there,
//! whose activations it may hold, whose output will find room. There will be room, too, if the
//! device at the channel's other end promises to take from it next; without promises every boundary
//! would leave a gap behind it. What comes out needs no more than one place in each channel, because
//! it was played with no more.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::super::{Action, DeviceId, Kind, StageId};
use super::device::{Device, Rank, most_held};

/// Plays the lists as wishes, none to hold more activations than the list that holds the most.
///
/// `rank` is told each action and its position in its list. The actions of one kind on one stage
/// keep their order. `None` where the limit brings everyone to a halt.
pub(in super::super) fn play(
    wishes: &[Vec<Action>],
    rank: impl Fn(usize, Action) -> Rank,
) -> Option<Vec<Vec<Action>>> {
    Game::new(wishes, rank).run()
}

struct Game {
    devices: Vec<Device>,
    device_of: Vec<DeviceId>,
    /// Before each stage: boundaries and gradients.
    channels: Vec<[Channel; 2]>,
    last: StageId,
    limit: usize,
    now: u64,
    /// Who is free and has a wish whose input is there.
    awake: BTreeSet<DeviceId>,
    ends: BinaryHeap<Reverse<(u64, DeviceId)>>,
}

#[derive(Clone, Copy, Default)]
struct Channel {
    waiting: usize,
    /// Being made, with the place taken already.
    coming: usize,
}

/// What a free device does.
enum Decision {
    /// Runs the wish of this lane, perhaps because of a neighbour's promise.
    Start(usize, Option<Promise>),
    /// Waits for a neighbour.
    Wait,
    /// Has nothing that could be run.
    Rest,
}

/// Whether an output will find room.
enum Room {
    Free,
    Promised(Promise),
    /// The neighbour who could make room has not decided yet.
    Undecided,
    Taken,
}

/// A device will take from this lane next.
struct Promise {
    by: DeviceId,
    lane: usize,
}

impl Game {
    fn new(wishes: &[Vec<Action>], rank: impl Fn(usize, Action) -> Rank) -> Self {
        let stages = wishes.iter().flatten().map(|a| a.stage.index() + 1).max().unwrap_or(0);
        let mut device_of = vec![DeviceId::default(); stages];
        for (d, list) in wishes.iter().enumerate() {
            list.iter().for_each(|action| device_of[action.stage.index()] = DeviceId::at(d));
        }
        let mut devices: Vec<_> = wishes.iter().map(|list| Device::new(list, &rank)).collect();
        for (&a, &b) in device_of.iter().zip(device_of.iter().skip(1)) {
            devices[a.index()].neighbours.insert(b);
            devices[b.index()].neighbours.insert(a);
        }
        Self {
            devices,
            device_of,
            channels: vec![[Channel::default(); 2]; stages],
            last: StageId::at(stages.saturating_sub(1)),
            limit: wishes.iter().map(|list| most_held(list)).max().unwrap_or(0),
            now: 0,
            awake: (0..wishes.len()).map(DeviceId::at).collect(),
            ends: BinaryHeap::new(),
        }
    }

    fn run(mut self) -> Option<Vec<Vec<Action>>> {
        loop {
            self.decide();
            let Some(&Reverse((now, _))) = self.ends.peek() else {
                break;
            };
            self.now = now;
            while let Some(&Reverse((end, device))) = self.ends.peek()
                && end == now
            {
                self.ends.pop();
                self.finish(device);
            }
        }
        let is_done = |device: &Device| device.lanes.iter().all(|lane| lane.wishes.is_empty());
        let all = self.devices.iter().all(is_done);
        all.then(|| self.devices.into_iter().map(|device| device.done).collect())
    }

    /// Lets everyone who can start something, the last device first, so that room opens along the
    /// forwards' way. A first wish may get its room from a neighbour who decides later; only when
    /// nobody moves any more does somebody settle for less.
    fn decide(&mut self) {
        let mut patient = self.awake.clone();
        let mut settling = self.awake.clone();
        while let Some((device, is_patient)) = next_of(&mut patient, &mut settling) {
            match self.choose(device, is_patient) {
                Decision::Start(lane, promise) => {
                    self.start(device, lane, promise);
                    let neighbours = &self.devices[device.index()].neighbours;
                    let waiting = neighbours.intersection(&self.awake);
                    for &neighbour in waiting {
                        patient.insert(neighbour);
                        settling.insert(neighbour);
                    }
                }
                Decision::Wait => {}
                Decision::Rest => {
                    self.awake.remove(&device);
                }
            }
        }
    }

    fn choose(&self, id: DeviceId, patient: bool) -> Decision {
        let device = &self.devices[id.index()];
        if device.running.is_some() {
            return Decision::Rest;
        }
        if let Some(lane) = device.promise {
            return Decision::Start(lane, None);
        }
        let mut best = (None, Decision::Rest);
        for lane in 0..device.lanes.len() {
            let Some((rank, action)) = self.ready(device, lane) else {
                continue;
            };
            if best.0.is_some_and(|best| best <= rank) {
                continue;
            }
            best = match self.room(id, action, patient) {
                Room::Free => (Some(rank), Decision::Start(lane, None)),
                Room::Promised(promise) => (Some(rank), Decision::Start(lane, Some(promise))),
                Room::Undecided => (Some(rank), Decision::Wait),
                Room::Taken if best.0.is_none() => (None, Decision::Wait),
                Room::Taken => best,
            };
        }
        best.1
    }

    /// A lane's next wish, if all is there that it needs.
    fn ready(&self, device: &Device, lane: usize) -> Option<(Rank, Action)> {
        let &(rank, action) = device.lanes[lane].wishes.front()?;
        let arrived = match action.source(self.last) {
            Some(_) => self.channels[action.stage.index()][action.channel()].waiting > 0,
            None => device.has_made_input(action),
        };
        let allowed = action.kind != Kind::Forward || device.held < self.limit;
        (arrived && allowed).then_some((rank, action))
    }

    fn room(&self, from: DeviceId, action: Action, patient: bool) -> Room {
        let Some(target) = action.target(self.last) else {
            return Room::Free;
        };
        let by = self.device_of[target.index()];
        let Channel { waiting, coming } = self.channels[target.index()][action.channel()];
        if by == from || waiting + coming == 0 {
            return Room::Free;
        }
        let neighbour = &self.devices[by.index()];
        if patient && neighbour.running.is_none() {
            return Room::Undecided;
        }
        let in_time = neighbour.running.is_none_or(|(_, end)| end <= self.now + ticks(action.kind));
        if coming > 0 || !in_time || neighbour.promise.is_some() {
            return Room::Taken;
        }
        match neighbour.lane(target, action.kind) {
            Some(lane) if self.can_promise(by, lane) => Room::Promised(Promise { by, lane }),
            _ => Room::Taken,
        }
    }

    /// Nothing will hinder the lane's next action once the device is free.
    fn can_promise(&self, by: DeviceId, lane: usize) -> bool {
        let device = &self.devices[by.index()];
        let Some(&(_, action)) = device.lanes[lane].wishes.front() else {
            return false;
        };
        let released = device.running.is_some_and(|(running, _)| running.kind.releases());
        let held = device.held - usize::from(released);
        let allowed = action.kind != Kind::Forward || held < self.limit;
        allowed && matches!(self.room(by, action, true), Room::Free)
    }

    fn start(&mut self, id: DeviceId, lane: usize, promise: Option<Promise>) {
        if let Some(Promise { by, lane }) = promise {
            self.devices[by.index()].promise = Some(lane);
        }
        let device = &mut self.devices[id.index()];
        device.promise = None;
        let Some((_, action)) = device.lanes[lane].wishes.pop_front() else {
            return;
        };
        let end = self.now + ticks(action.kind);
        device.running = Some((action, end));
        device.held += usize::from(action.kind == Kind::Forward);
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
        let Some((action, _)) = device.running.take() else {
            return;
        };
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
fn ticks(kind: Kind) -> u64 {
    if kind == Kind::Backward { 2 } else { 1 }
}
