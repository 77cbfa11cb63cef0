//! Runs actions and moves on paper, with a clock: both directions of a bus slow each other down, so
//! when a move ends depends on what else is under way.
//!
//! A move begins when the actions before it are done and its direction of the bus is free, in the
//! order of the list. A stage's first fetch also waits for its update by the step before, which runs
//! at home from the beginning of this one. An action begins when its device and its input are ready, as in
//! [`simulate`](super::super::simulate), and its weights and its boundary are there.

use std::collections::BTreeSet;

use super::super::simulate::{Arrivals, Ways};
use super::super::{
    Action, ActionKind, Actions, CostError, Costs, DeviceId, DeviceUse, MoveSpan, Simulation, Span,
    StageId,
};
use super::bus::{BusClock, WaitingMove};
use super::held::HeldBytes;
use super::{Home, Move, MoveKind, Moves};

/// Simulates one step whose weights or boundaries live on the host, with a lane for each device's bus.
///
/// Memory is counted with its queues: a boundary or its gradient is there from its arrival on.
///
/// # Errors
/// Where the costs or the moves are not those of the schedule, or are negative or no numbers.
pub fn simulate_moves(
    actions: &Actions,
    moves: &Moves,
    costs: &Costs,
) -> Result<Simulation, CostError> {
    costs.check(actions.stages())?;
    // They may be those of other lists, with which this one would never come to its end.
    Moves::given(actions.lists(), moves.homes(), moves.slots(), moves.lists().to_vec())?;
    let devices = Player::new(actions, moves, costs).run()?;
    let last_end = |device: &DevicePlay| {
        let action = device.spans.last().map_or(0.0, |span| span.end);
        device.moved.iter().map(|span| span.end).fold(action, f64::max)
    };
    let makespan = devices.iter().map(last_end).fold(0.0, f64::max);
    let used = |device: &DevicePlay| {
        let busy = device.spans.iter().map(|span| costs.time(span.action)).sum();
        let idle = f64::max(makespan - busy, 0.0);
        let (peak_bytes, peak_held) = device.held.peak();
        DeviceUse { busy, idle, peak_bytes, peak_held }
    };
    Ok(Simulation {
        devices: devices.iter().map(used).collect(),
        makespan,
        levels: devices.iter().map(|device| device.held.levels().to_vec()).collect(),
        moves: devices.iter().map(|device| device.moved.clone()).collect(),
        timeline: devices.into_iter().map(|device| device.spans).collect(),
    })
}

/// All devices at one moment.
struct Player<'a> {
    actions: &'a Actions,
    moves: &'a Moves,
    costs: &'a Costs,
    now: f64,
    devices: Vec<DevicePlay>,
    boundaries: Arrivals,
    gradients: Arrivals,
    ways: Ways,
    /// When the step before has updated each stage that lives on the host.
    updated: Vec<f64>,
    /// What is on its way between devices: when it is there, where, and its bytes.
    arriving: Vec<(f64, DeviceId, u64)>,
}

/// How far a device and its bus have come.
struct DevicePlay {
    spans: Vec<Span>,
    /// Actions that are done; one more has begun where there is one span more.
    done: usize,
    next_move: usize,
    bus: BusClock,
    moved: Vec<MoveSpan>,
    /// What is not on the device, or not yet: stages that live on the host and boundaries.
    away: BTreeSet<Moved>,
    held: HeldBytes,
}

/// What a move brings or takes: a stage's weights, or one boundary.
type Moved = (StageId, Option<super::MicroBatchId>);

impl<'a> Player<'a> {
    fn new(actions: &'a Actions, moves: &'a Moves, costs: &'a Costs) -> Self {
        let at_host = |(j, home): (usize, &super::StageHome)| {
            (home.weights == Home::Host).then_some((StageId::at(j), None))
        };
        let away: BTreeSet<_> = moves.homes().iter().enumerate().filter_map(at_host).collect();
        let device = |d: usize| DevicePlay {
            spans: Vec::with_capacity(actions.lists()[d].len()),
            done: 0,
            next_move: 0,
            bus: BusClock::new(costs.bus),
            moved: Vec::new(),
            away: away.clone(),
            held: HeldBytes::new(actions, moves, costs, DeviceId::at(d)),
        };
        Self {
            actions,
            moves,
            costs,
            now: 0.0,
            devices: (0..actions.devices()).map(device).collect(),
            boundaries: Arrivals::new(actions),
            gradients: Arrivals::new(actions),
            ways: Ways::new(actions.devices(), costs.link),
            updated: updated(moves, costs),
            arriving: Vec::new(),
        }
    }

    /// Validated actions with validated moves never come to a halt before their end.
    fn run(mut self) -> Result<Vec<DevicePlay>, CostError> {
        loop {
            while self.settle() {}
            match self.next_time() {
                None => {
                    let lists = self.actions.lists().iter().zip(&self.devices);
                    debug_assert!(lists.into_iter().all(|(list, play)| play.done == list.len()));
                    return Ok(self.devices);
                }
                Some(time) if !time.is_finite() => return Err(CostError::Overflow),
                Some(time) => self.advance(time),
            }
        }
    }

    /// What ends now ends, then what can begin begins; ends come first, because they make room.
    fn settle(&mut self) -> bool {
        let mut changed = self.receive();
        for d in (0..self.devices.len()).map(DeviceId::at) {
            changed |= self.end_moves(d);
            changed |= self.end_action(d);
        }
        for d in (0..self.devices.len()).map(DeviceId::at) {
            changed |= self.begin_moves(d);
            changed |= self.begin_action(d);
        }
        changed
    }

    fn next_time(&self) -> Option<f64> {
        let running = |device: &DevicePlay| device.running().map(|span| span.end);
        let actions = self.devices.iter().filter_map(running);
        let moves = self.devices.iter().filter_map(|device| device.bus.next_change(self.now));
        let arrivals = self.arriving.iter().map(|(time, ..)| *time);
        actions.chain(moves).chain(arrivals).min_by(f64::total_cmp)
    }

    fn advance(&mut self, time: f64) {
        self.devices.iter_mut().for_each(|device| device.bus.advance(self.now, time));
        self.now = time;
    }

    fn receive(&mut self) -> bool {
        let now = self.now;
        let arrived: Vec<_> = self.arriving.extract_if(.., |(time, ..)| *time <= now).collect();
        for (time, device, bytes) in &arrived {
            self.devices[device.index()].held.take(*time, *bytes);
        }
        !arrived.is_empty()
    }

    fn end_moves(&mut self, device: DeviceId) -> bool {
        let play = &mut self.devices[device.index()];
        let ended = play.bus.take_ended();
        for &(moved, start) in &ended {
            let bytes = self.costs.moved_bytes(moved);
            play.moved.push(MoveSpan { moved, start, end: self.now, bytes });
            if moved.kind.is_inward() {
                play.away.remove(&(moved.stage, moved.micro_batch));
            } else {
                play.held.leave(self.now, moved);
            }
        }
        !ended.is_empty()
    }

    /// Hands what has become possible to the bus; a release takes effect at once.
    fn begin_moves(&mut self, device: DeviceId) -> bool {
        let play = &mut self.devices[device.index()];
        let list = &self.moves.lists()[device.index()];
        let first = play.next_move;
        while let Some(&one) = list.get(play.next_move).filter(|one| one.before <= play.done) {
            play.next_move += 1;
            if matches!(one.kind, MoveKind::Release | MoveKind::BoundaryOut) {
                play.away.insert((one.stage, one.micro_batch));
            }
            if one.kind != MoveKind::Release {
                let bytes = self.costs.moved_bytes(one);
                let is_fetch = one.kind == MoveKind::Fetch;
                let ready = if is_fetch { self.updated[one.stage.index()] } else { 0.0 };
                play.bus.queue(WaitingMove { moved: one, bytes, ready });
            }
        }
        for begun in play.bus.begin(self.now) {
            if begun.kind == MoveKind::BoundaryIn {
                play.held.come(self.now, begun);
            }
        }
        play.next_move > first
    }

    fn begin_action(&mut self, device: DeviceId) -> bool {
        let position = self.devices[device.index()].spans.len();
        let Some(&action) = self.actions.lists()[device.index()].get(position) else {
            return false;
        };
        let play = &self.devices[device.index()];
        // The moves that are started before it have been handed over, so what is away is known.
        let is_free = play.running().is_none();
        if !is_free || play.lacks(action) || !self.has_arrived(action) {
            return false;
        }
        let now = self.now;
        let end = now + self.costs.time(action);
        let play = &mut self.devices[device.index()];
        play.held.begin(now, action);
        play.spans.push(Span { action, start: now, end, bytes: play.held.now() });
        true
    }

    fn has_arrived(&mut self, action: Action) -> bool {
        let last = StageId::at(self.actions.stages() - 1);
        if action.source(last).is_none() {
            return true;
        }
        let gradient = action.kind.passes_gradient();
        let arrivals = if gradient { &mut self.gradients } else { &mut self.boundaries };
        // NaN before it is sent, which is no time that has come.
        *arrivals.cell(action.stage, action) <= self.now
    }

    fn end_action(&mut self, device: DeviceId) -> bool {
        let now = self.now;
        let play = &mut self.devices[device.index()];
        let Some(action) = play.running().filter(|span| span.end <= now).map(|span| span.action)
        else {
            return false;
        };
        play.done += 1;
        play.held.end(now, action);
        self.deliver(action, device);
        let play = &mut self.devices[device.index()];
        let bytes = play.held.now();
        let span = play.spans.last_mut().expect("it was running");
        span.bytes = span.bytes.max(bytes);
        true
    }

    /// Hands the action's output to the stage that waits for it.
    fn deliver(&mut self, action: Action, from: DeviceId) {
        let last = StageId::at(self.actions.stages() - 1);
        let Some(target) = action.target(last) else {
            return;
        };
        // A boundary's gradient has its size.
        let boundary = if action.kind == ActionKind::Forward { target } else { action.stage };
        let bytes = self.costs.input_bytes_of(boundary);
        let to = self.actions.placement()[target.index()];
        let arrival = self.ways.transfer(from, to, bytes, self.now);
        let gradient = action.kind.passes_gradient();
        let arrivals = if gradient { &mut self.gradients } else { &mut self.boundaries };
        *arrivals.cell(target, action) = arrival;
        if arrival <= self.now {
            self.devices[to.index()].held.take(arrival, bytes);
        } else {
            self.arriving.push((arrival, to, bytes));
        }
    }
}

/// The host updates one stage after the other, in the order in which the forward needs them.
fn updated(moves: &Moves, costs: &Costs) -> Vec<f64> {
    let mut time = 0.0;
    let stages = moves.homes().iter().zip(&costs.stages);
    let end = stages.map(|(home, cost)| {
        let at_home = home.weights == Home::Host && home.trained;
        time += if at_home { cost.home_update } else { 0.0 };
        time
    });
    end.collect()
}

impl DevicePlay {
    fn running(&self) -> Option<&Span> {
        self.spans.last().filter(|_| self.spans.len() > self.done)
    }

    /// Whether the action's weights or boundary are not there.
    fn lacks(&self, action: Action) -> bool {
        let boundary = (action.stage, Some(action.micro_batch));
        self.away.contains(&(action.stage, None))
            || action.kind != ActionKind::Forward && self.away.contains(&boundary)
    }
}

impl Costs {
    /// The bytes that cross the bus.
    fn moved_bytes(&self, one: Move) -> u64 {
        let stage = &self.stages[one.stage.index()];
        match one.kind {
            MoveKind::Fetch => stage.fetched_bytes,
            MoveKind::GradientsHome => stage.sent_bytes,
            MoveKind::BoundaryOut | MoveKind::BoundaryIn => self.input_bytes_of(one.stage),
            MoveKind::Release => 0,
        }
    }
}
