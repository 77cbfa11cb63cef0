//! Simulates actions and transfers with a clock: transfers in both directions slow each other down, so the end
//! of a transfer depends on the others in flight.
//!
//! A transfer begins when the actions before it are done and its direction of the host link is free, in the
//! order of the list. If stages are updated after the step, a stage's first fetch also brings the data for the
//! previous step's update, and the updated data are sent back at once. An action begins when its device and
//! its input are ready, as in [`simulate`](super::super::simulate), and its weights and its boundary are on
//! the device.

use std::collections::BTreeSet;

use super::super::simulate::{Arrivals, Ways};
use super::super::{
    Action, ActionKind, Actions, Awaited, CostError, Costs, DeviceId, DeviceUse, HostLinkUse,
    Simulation, Span, StageId, TransferSpan, WaitSpan,
};
use super::held::HeldBytes;
use super::host_link::{HostLinkClock, WaitingTransfer};
use super::make::{waiting, waits_on_host};
use super::{Location, MicroBatchId, Payload, Transfer, TransferKind, Transfers};

/// Simulates one step with offloaded weights or boundaries, and the transfers of each device.
///
/// Memory includes queues: a boundary or its gradient counts from its arrival on.
///
/// # Errors
/// If costs or transfers do not match the schedule, or a cost is negative or NaN.
pub fn simulate_transfers(
    actions: &Actions,
    transfers: &Transfers,
    costs: &Costs,
) -> Result<Simulation, CostError> {
    costs.check(actions.stages())?;
    // Transfers made for other lists could block this simulation before its end.
    Transfers::given(
        actions.lists(),
        transfers.locations(),
        transfers.device_buffers(),
        transfers.lists().to_vec(),
    )?;
    let devices = Player::new(actions, transfers, costs).run()?;
    let last_end = |device: &DevicePlay| {
        let action = device.spans.last().map_or(0.0, |span| span.end);
        device.used.transfers.iter().map(|span| span.end).fold(action, f64::max)
    };
    let makespan = devices.iter().map(last_end).fold(0.0, f64::max);
    let mut step = Simulation { makespan, ..Simulation::default() };
    for mut device in devices {
        device.held.finish(makespan);
        let busy = device.spans.iter().map(|span| costs.time(span.action)).sum();
        let idle = f64::max(makespan - busy, 0.0);
        let (peak_bytes, peak_held) = device.held.peak();
        step.devices.push(DeviceUse { busy, idle, peak_bytes, peak_held });
        step.levels.push(device.held.levels);
        step.host_links.push(device.used);
        step.timeline.push(device.spans);
    }
    Ok(step)
}

/// State of all devices at one time.
struct Player<'a> {
    actions: &'a Actions,
    transfers: &'a Transfers,
    costs: &'a Costs,
    now: f64,
    devices: Vec<DevicePlay>,
    arrivals: Arrivals,
    ways: Ways,
    /// Transfers between devices in flight: arrival, target and bytes.
    arriving: Vec<(f64, DeviceId, u64)>,
    /// Boundaries and gradients that have reached the host, from any device.
    on_host: BTreeSet<Payload>,
    /// Micro-batches whose input is freed between forward and recompute.
    waiting: BTreeSet<(StageId, MicroBatchId)>,
}

/// Progress of a device and its host link.
struct DevicePlay {
    spans: Vec<Span>,
    /// Number of finished actions. If there is one more span, its action is running.
    done: usize,
    next_transfer: usize,
    /// Stages that were already fetched with the previous step's update.
    updated: BTreeSet<StageId>,
    /// Stages whose update comes with the fetch in flight.
    updating: BTreeSet<StageId>,
    host_link: HostLinkClock,
    used: HostLinkUse,
    /// Cause and start of the present wait of compute.
    waits: Option<(Awaited, f64)>,
    /// Offloaded weights and boundaries that are not on the device.
    away: BTreeSet<Payload>,
    held: HeldBytes,
}

impl<'a> Player<'a> {
    fn new(actions: &'a Actions, transfers: &'a Transfers, costs: &'a Costs) -> Self {
        let away = first_away(actions, transfers);
        let device = |d: usize| DevicePlay {
            spans: Vec::with_capacity(actions.lists()[d].len()),
            done: 0,
            next_transfer: 0,
            updated: BTreeSet::new(),
            updating: BTreeSet::new(),
            host_link: HostLinkClock::new(costs.host_link),
            used: HostLinkUse::default(),
            waits: None,
            away: away.clone(),
            held: HeldBytes::new(actions, transfers, costs, DeviceId::at(d)),
        };
        Self {
            actions,
            transfers,
            costs,
            now: 0.0,
            devices: (0..actions.devices()).map(device).collect(),
            arrivals: Arrivals::new(actions),
            ways: Ways::new(actions.devices(), costs.link),
            arriving: Vec::new(),
            on_host: BTreeSet::new(),
            waiting: actions
                .lists()
                .iter()
                .flat_map(|list| waiting(list, transfers.locations()))
                .collect(),
        }
    }

    /// Runs all actions and transfers. They are validated, so none waits for ever.
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

    /// Ends the actions and transfers that are done, then begins those that can start. Ends come first,
    /// because they free memory. Returns whether anything changed.
    fn settle(&mut self) -> bool {
        let mut changed = self.receive();
        for d in (0..self.devices.len()).map(DeviceId::at) {
            changed |= self.end_transfers(d);
            changed |= self.end_action(d);
        }
        for d in (0..self.devices.len()).map(DeviceId::at) {
            changed |= self.begin_transfers(d);
            changed |= self.begin_action(d);
        }
        changed
    }

    fn next_time(&self) -> Option<f64> {
        let running = |device: &DevicePlay| device.running().map(|span| span.end);
        let actions = self.devices.iter().filter_map(running);
        let transfers =
            self.devices.iter().filter_map(|device| device.host_link.next_change(self.now));
        let arrivals = self.arriving.iter().map(|(time, ..)| *time);
        actions.chain(transfers).chain(arrivals).min_by(f64::total_cmp)
    }

    fn advance(&mut self, time: f64) {
        self.devices.iter_mut().for_each(|device| device.host_link.advance(self.now, time));
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

    fn end_transfers(&mut self, device: DeviceId) -> bool {
        let play = &mut self.devices[device.index()];
        let ended = play.host_link.take_ended();
        for &(transfer, bytes, start) in &ended {
            play.used.transfers.push(TransferSpan { transfer, start, end: self.now, bytes });
            match transfer.kind {
                // Sums are freed when the next stage's sums are sent.
                TransferKind::OffloadGradients => {}
                TransferKind::OffloadState => {}
                kind if kind.is_inward() => drop(play.away.remove(&Payload::of(transfer))),
                _ => {
                    play.held.give(self.now, bytes);
                    self.on_host.insert(Payload::of(transfer));
                }
            }
            if transfer.kind == TransferKind::Fetch && play.updating.remove(&transfer.stage) {
                let bytes = self.costs.stages[transfer.stage.index()].update_out_bytes;
                let transfer = Transfer { kind: TransferKind::OffloadState, ..transfer };
                play.host_link.queue(WaitingTransfer { transfer, bytes });
            }
        }
        !ended.is_empty()
    }

    /// Queues the transfers that can start now; a release takes effect at once.
    fn begin_transfers(&mut self, device: DeviceId) -> bool {
        let play = &mut self.devices[device.index()];
        let list = &self.transfers.lists()[device.index()];
        let first = play.next_transfer;
        while let Some(&one) = list.get(play.next_transfer).filter(|one| one.before <= play.done) {
            play.next_transfer += 1;
            // A boundary that is sent to the host is away until it is copied back.
            if matches!(one.kind, TransferKind::Release | TransferKind::BoundaryOut) {
                play.away.insert(Payload::of(one));
            }
            match one.kind {
                TransferKind::OffloadGradients => play.held.set_out(self.now, one.stage),
                // The copy's memory is allocated from now on, even while other transfers occupy the link.
                TransferKind::BoundaryIn | TransferKind::GradientIn => {
                    play.held.take(self.now, self.costs.transfer_bytes(one));
                }
                _ => {}
            }
            if one.kind != TransferKind::Release {
                let mut bytes = self.costs.transfer_bytes(one);
                let updates = one.kind == TransferKind::Fetch
                    && match self.costs.update_in_backward {
                        true => one.completes_gradients(&list[play.next_transfer..]),
                        false => play.updated.insert(one.stage),
                    };
                if updates && self.transfers.locations()[one.stage.index()].trained {
                    let cost = &self.costs.stages[one.stage.index()];
                    bytes = bytes.saturating_add(cost.update_in_bytes);
                    if cost.update_out_bytes > 0 {
                        play.updating.insert(one.stage);
                    }
                }
                play.host_link.queue(WaitingTransfer { transfer: one, bytes });
            }
        }
        let on_host = &self.on_host;
        let can_come =
            |one: Transfer| one.kind == TransferKind::Fetch || on_host.contains(&Payload::of(one));
        play.host_link.begin(self.now, can_come);
        play.next_transfer > first
    }

    fn begin_action(&mut self, device: DeviceId) -> bool {
        let position = self.devices[device.index()].spans.len();
        let Some(&action) = self.actions.lists()[device.index()].get(position) else {
            return false;
        };
        let now = self.now;
        let play = &mut self.devices[device.index()];
        if play.running().is_some() {
            return false;
        }
        // All transfers that start before this action are queued by now, so the data that are away are known.
        let lacks = play.lacks(action);
        play.wait(now, lacks);
        if lacks.is_some() || !self.has_arrived(action) {
            return false;
        }
        let end = now + self.costs.time(action);
        let play = &mut self.devices[device.index()];
        play.held.begin(now, action);
        play.spans.push(Span { action, start: now, end, bytes: play.held.now() });
        true
    }

    fn has_arrived(&mut self, action: Action) -> bool {
        if action.source(self.actions.last_stage()).is_none() {
            return true;
        }
        let gradient = action.kind.passes_gradient();
        let boundary = if gradient { StageId(action.stage.0 + 1) } else { action.stage };
        if waits_on_host(self.transfers.locations(), boundary) {
            // A transfer brings this input, and `lacks` has found that it is on the device.
            return true;
        }
        // NaN before it is sent, which compares as not arrived.
        *self.arrivals.cell(action.stage, action) <= self.now
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
        let pair = (action.stage, action.micro_batch);
        let is_let_go = action.kind == ActionKind::Forward && self.waiting.contains(&pair);
        // The host has copies of the inputs of later stages, which are dropped from the device now. The first
        // stage's input has no copy until it has been sent to the host.
        if is_let_go && action.stage > StageId(0) {
            play.held.give(now, self.costs.input_bytes_of(action.stage));
            play.away.insert(Payload::Boundary(action.stage, action.micro_batch));
        }
        self.deliver(action, device);
        let play = &mut self.devices[device.index()];
        let bytes = play.held.now();
        let span = play.spans.last_mut().expect("it was running");
        span.bytes = span.bytes.max(bytes);
        true
    }

    /// Passes the action's output to the stage that waits for it.
    fn deliver(&mut self, action: Action, from: DeviceId) {
        let Some(target) = action.target(self.actions.last_stage()) else { return };
        // A boundary's gradient has the size of the boundary.
        let boundary = if action.kind == ActionKind::Forward { target } else { action.stage };
        let bytes = self.costs.input_bytes_of(boundary);
        if waits_on_host(self.transfers.locations(), boundary) {
            // The output stays here until its transfer has copied it to the host.
            self.devices[from.index()].held.take(self.now, bytes);
            return;
        }
        let to = self.actions.placement()[target.index()];
        let arrival = self.ways.transfer(from, to, bytes, self.now);
        *self.arrivals.cell(target, action) = arrival;
        let held = &self.devices[to.index()].held;
        let is_gradient = action.kind.passes_gradient();
        let bytes = if is_gradient { bytes } else { held.input_of(target, action.micro_batch) };
        if arrival <= self.now {
            self.devices[to.index()].held.take(arrival, bytes);
        } else {
            self.arriving.push((arrival, to, bytes));
        }
    }
}

impl DevicePlay {
    fn running(&self) -> Option<&Span> {
        self.spans.last().filter(|_| self.spans.len() > self.done)
    }

    /// Returns which data the action lacks: data that it needs but that are not on the device.
    fn lacks(&self, action: Action) -> Option<Awaited> {
        let Action { kind, stage, micro_batch } = action;
        let is_away = |transfer: Payload| self.away.contains(&transfer);
        let uses_input = matches!(kind, ActionKind::Forward | ActionKind::Recompute);
        let gradient = Payload::Gradient(StageId(stage.0 + 1), micro_batch);
        let lacks_boundary = uses_input && is_away(Payload::Boundary(stage, micro_batch))
            || kind.passes_gradient() && is_away(gradient);
        if is_away(Payload::Weights(stage)) {
            return Some(Awaited::Weights);
        }
        lacks_boundary.then_some(Awaited::Boundaries)
    }

    /// Records the cause of compute's wait from now on, or its end.
    fn wait(&mut self, now: f64, awaited: Option<Awaited>) {
        if self.waits.map(|(awaited, _)| awaited) == awaited {
            return;
        }
        let ended = self.waits.take().filter(|(_, start)| *start < now);
        let ended = ended.map(|(awaited, start)| WaitSpan { awaited, start, end: now });
        self.used.waits.extend(ended);
        self.waits = awaited.map(|awaited| (awaited, now));
    }
}

/// Returns the data that are on no device at the step's start: offloaded weights, and boundaries and
/// gradients that will be offloaded.
fn first_away(actions: &Actions, transfers: &Transfers) -> BTreeSet<Payload> {
    let mut away = BTreeSet::new();
    for (j, location) in transfers.locations().iter().enumerate() {
        let stage = StageId::at(j);
        if location.weights == Location::Host {
            away.insert(Payload::Weights(stage));
        }
        if location.boundaries == Location::Host && j > 0 {
            for i in (0..actions.micro_batches()).map(MicroBatchId::at) {
                away.extend([Payload::Boundary(stage, i), Payload::Gradient(stage, i)]);
            }
        }
    }
    away
}

impl Costs {
    /// Returns the number of bytes of a transfer in a list.
    fn transfer_bytes(&self, one: Transfer) -> u64 {
        let stage = &self.stages[one.stage.index()];
        match one.kind {
            TransferKind::Fetch => stage.fetched_bytes,
            TransferKind::OffloadGradients => stage.sent_bytes,
            TransferKind::BoundaryOut
            | TransferKind::BoundaryIn
            | TransferKind::GradientOut
            | TransferKind::GradientIn => self.input_bytes_of(one.stage),
            // Transfers of state are not in the lists: they come with a fetch, if there is an update.
            TransferKind::FetchState | TransferKind::OffloadState | TransferKind::Release => 0,
        }
    }
}
