//! Plays a step with the stages' times: every free device runs the action that a policy prefers. The
//! resulting order becomes the schedule.
//!
//! A device knows the arrival times of started transfers. The newest weight gradient runs first, so that a
//! split backward without an action in between can be joined again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::memory::{HeldAs, Hold, StageBefore};
use super::super::simulate::Ways;
use super::super::{Action, ActionKind, DeviceId, MicroBatchId, Recompute, StageId};
use super::Work;
use super::policy::Policy;

/// Returns the lists of the devices, without recomputes; `None` if lack of memory stops all devices.
pub(super) fn play(work: Work<'_>, policy: Policy) -> Option<Vec<Vec<Action>>> {
    let mut player = GreedyRun::new(work, policy);
    while let Some(Reverse((now, device))) = player.looks.pop() {
        player.look(device, now.0);
    }
    let is_done = |stage: &StageProgress| stage.released == work.micro_batches;
    let all_done = player.stages.iter().all(is_done);
    all_done.then(|| player.devices.into_iter().map(|device| device.list).collect())
}

/// Time, with a total order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct SimulatedTime(f64);

impl Eq for SimulatedTime {}

impl PartialOrd for SimulatedTime {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for SimulatedTime {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

struct GreedyRun<'a> {
    work: Work<'a>,
    policy: Policy,
    devices: Vec<GreedyDevice>,
    stages: Vec<StageProgress>,
    ways: Ways,
    /// Times at which devices check for an action to run.
    looks: BinaryHeap<Reverse<(SimulatedTime, DeviceId)>>,
}

struct GreedyDevice {
    stages: Vec<StageId>,
    list: Vec<Action>,
    free: f64,
    bytes: u128,
    limit: u128,
    /// Bytes that a forward leaves free, so that a gradient can always follow.
    reserve: u128,
}

/// Progress of a stage, which runs the micro-batches in order.
#[derive(Default)]
struct StageProgress {
    forwards: usize,
    gradients: usize,
    /// Micro-batches whose weight gradient is still to run.
    weights: Vec<MicroBatchId>,
    released: usize,
    /// Arrival times of the boundaries and gradients that were sent.
    boundaries: Vec<f64>,
    gradients_in: Vec<f64>,
}

/// Actions that a device could run.
#[derive(Default)]
struct Outlook {
    gradient: Option<Action>,
    forward: Option<Action>,
    /// Arrival time of the next gradient, and of the next input of any kind.
    next_gradient: f64,
    next: f64,
    /// Whether a forward is ready but does not fit into memory.
    is_full: bool,
}

impl<'a> GreedyRun<'a> {
    fn new(work: Work<'a>, policy: Policy) -> Self {
        let ids = || (0..work.recipe.memory.len()).map(DeviceId::at);
        Self {
            work,
            policy,
            devices: ids().map(|device| GreedyDevice::new(work, device)).collect(),
            stages: work.placement.iter().map(|_| StageProgress::default()).collect(),
            ways: Ways::new(work.recipe.memory.len(), work.recipe.costs.link),
            looks: ids().map(|device| Reverse((SimulatedTime(0.0), device))).collect(),
        }
    }

    /// Starts an action on a device, if the device is free and an action is ready.
    fn look(&mut self, id: DeviceId, now: f64) {
        if self.devices[id.index()].free > now {
            return;
        }
        let outlook = self.outlook(id, now);
        match self.choose(id, &outlook, now) {
            Some(action) => self.begin(id, action, now),
            // Estimated arrivals schedule no check: the sender schedules one when it starts.
            None => {
                let known = |stage: &StageId| self.known_arrivals(*stage);
                let later = self.devices[id.index()].stages.iter().flat_map(known);
                if let Some(next) = later.filter(|at| *at > now).min_by(f64::total_cmp) {
                    self.looks.push(Reverse((SimulatedTime(next), id)));
                }
            }
        }
    }

    fn choose(&self, id: DeviceId, outlook: &Outlook, now: f64) -> Option<Action> {
        let &Outlook { gradient, forward, next_gradient, next, is_full } = outlook;
        let Policy { forward_first, forward_delay, weight_delay, .. } = self.policy;
        let in_time = |action: &Action, next: f64, delay: f64| {
            now + self.work.recipe.costs.time(*action) * (1.0 - delay) <= next
        };
        let forward = forward
            .filter(|forward| gradient.is_some() || in_time(forward, next_gradient, forward_delay));
        let urgent = if forward_first { forward.or(gradient) } else { gradient.or(forward) };
        urgent.or_else(|| {
            let weight = self.newest_weight(id)?;
            (is_full || in_time(&weight, next, weight_delay)).then_some(weight)
        })
    }

    fn outlook(&self, id: DeviceId, now: f64) -> Outlook {
        let device = &self.devices[id.index()];
        let mut outlook =
            Outlook { next: f64::INFINITY, next_gradient: f64::INFINITY, ..Outlook::default() };
        for &stage in &device.stages {
            if let Some((action, at)) = self.next_gradient(stage, now) {
                let hold = self.work.hold(action);
                if device.bytes + hold.takes + hold.passing > device.limit {
                    outlook.is_full = true;
                } else if at <= now {
                    outlook.gradient = outlook.gradient.or(Some(action));
                } else {
                    outlook.next_gradient = outlook.next_gradient.min(at);
                }
            }
            if let Some((action, at)) = self.next_forward(stage, now) {
                if !self.has_capacity(device, action) {
                    outlook.is_full |= at <= now;
                } else if at <= now {
                    // Take the stage furthest along the model: its output is the closest to a gradient.
                    outlook.forward = Some(action);
                } else {
                    outlook.next = outlook.next.min(at);
                }
            }
        }
        outlook.next = outlook.next.min(outlook.next_gradient);
        outlook
    }

    fn has_capacity(&self, device: &GreedyDevice, forward: Action) -> bool {
        let progress = &self.stages[forward.stage.index()];
        let held = progress.forwards - progress.released;
        let bytes = device.bytes + self.work.hold(forward).takes + device.reserve;
        held < self.policy.depth.of(forward.stage.index(), self.stages.len())
            && bytes <= device.limit
    }

    /// Returns the stage's next forward, and its earliest start as far as known.
    fn next_forward(&self, stage: StageId, now: f64) -> Option<(Action, f64)> {
        let progress = &self.stages[stage.index()];
        let i = progress.forwards;
        if i == self.work.micro_batches {
            return None;
        }
        let action = Action::new(stage, ActionKind::Forward, MicroBatchId::at(i));
        let arrived = progress.boundaries.get(i).copied();
        Some((action, arrived.unwrap_or_else(|| self.soonest(action, now))))
    }

    /// Returns the stage's next backward or input gradient, and its earliest start. If a recompute comes first,
    /// the start is that of the recompute, which can run before the gradient arrives.
    fn next_gradient(&self, stage: StageId, now: f64) -> Option<(Action, f64)> {
        let progress = &self.stages[stage.index()];
        let i = progress.gradients;
        if i == progress.forwards {
            return None;
        }
        let split = self.policy.halved.splits(i, self.work.micro_batches, self.stages.len());
        let kind = if split { ActionKind::InputGradient } else { ActionKind::Backward };
        let action = Action::new(stage, kind, MicroBatchId::at(i));
        let arrived = progress.gradients_in.get(i).copied();
        let at = arrived.unwrap_or_else(|| self.soonest(action, now));
        Some((action, at - self.recompute_time(action)))
    }

    /// Returns the earliest arrival of an input whose sender has not started.
    fn soonest(&self, action: Action, now: f64) -> f64 {
        let Some(source) = action.source(self.last()) else { return 0.0 };
        let sender = &self.devices[self.work.placement[source.index()].index()];
        let time = self.work.recipe.costs.time(Action { stage: source, ..action });
        f64::max(now, sender.free) + time + self.work.recipe.costs.link.latency
    }

    fn known_arrivals(&self, stage: StageId) -> impl Iterator<Item = f64> {
        let progress = &self.stages[stage.index()];
        let boundary = progress.boundaries.get(progress.forwards).copied();
        let gradient = progress.gradients_in.get(progress.gradients).copied();
        let kind = ActionKind::InputGradient;
        let next = Action::new(stage, kind, MicroBatchId::at(progress.gradients));
        let gradient = gradient.map(|at| at - self.recompute_time(next));
        boundary.into_iter().chain(gradient)
    }

    /// Returns the newest weight gradient still to run, of the stage that has most of them.
    fn newest_weight(&self, id: DeviceId) -> Option<Action> {
        let weights = |stage: &&StageId| self.stages[stage.index()].weights.len();
        let stage = *self.devices[id.index()].stages.iter().max_by_key(weights)?;
        let micro_batch = *self.stages[stage.index()].weights.last()?;
        Some(Action::new(stage, ActionKind::WeightGradient, micro_batch))
    }

    fn begin(&mut self, id: DeviceId, action: Action, now: f64) {
        let hold = self.work.hold(action);
        let arrived =
            self.stages[action.stage.index()].gradients_in.get(action.micro_batch.index());
        let input = arrived.copied().filter(|_| action.kind.passes_gradient()).unwrap_or(now);
        let begin = f64::max(now + self.recompute_time(action), input);
        let end = begin + self.work.recipe.costs.time(action);
        let device = &mut self.devices[id.index()];
        device.bytes = device.bytes + hold.takes - hold.gives;
        device.free = end;
        device.list.push(action);
        self.stages[action.stage.index()].note(action);
        self.looks.push(Reverse((SimulatedTime(end), id)));
        self.send(id, action, now, end);
    }

    fn send(&mut self, from: DeviceId, action: Action, now: f64, end: f64) {
        let Some(target) = action.target(self.last()) else { return };
        let to = self.work.placement[target.index()];
        let boundary = action.stage.min(target);
        let bytes = self.work.recipe.costs.stages[boundary.index()].output_bytes;
        let arrival = self.ways.transfer(from, to, bytes, end);
        let progress = &mut self.stages[target.index()];
        match action.kind {
            ActionKind::Forward => progress.boundaries.push(arrival),
            _ => progress.gradients_in.push(arrival),
        }
        // Check at `now` too: an idle device may decide to wait for this input, and has no other check scheduled.
        for at in [now, arrival] {
            self.looks.push(Reverse((SimulatedTime(at), to)));
        }
    }

    /// Returns the time of the recompute before a gradient.
    fn recompute_time(&self, action: Action) -> f64 {
        let device = &self.devices[self.work.placement[action.stage.index()].index()];
        let mode = self.work.recompute[action.stage.index()];
        let is_woven = action.kind.passes_gradient() && mode.applies(device.list.last(), action);
        if is_woven { self.work.recipe.costs.stages[action.stage.index()].recompute } else { 0.0 }
    }

    fn last(&self) -> StageId {
        StageId::at(self.stages.len() - 1)
    }
}

impl Work<'_> {
    /// Returns the bytes of an action; a gradient includes its recompute.
    fn hold(self, action: Action) -> Hold {
        let is_recomputed = self.recompute[action.stage.index()] != Recompute::Never;
        // Consecutive stages on the same device are rare, so only the simulation counts the boundaries
        // between them.
        let held = HeldAs { is_recomputed, before: StageBefore::Elsewhere, is_after_here: false };
        let hold = Hold::new(&self.recipe.costs, action, held);
        if !(is_recomputed && action.kind.passes_gradient()) {
            return hold;
        }
        let again = Action { kind: ActionKind::Recompute, ..action };
        Hold { takes: hold.takes + Hold::new(&self.recipe.costs, again, held).takes, ..hold }
    }
}

impl GreedyDevice {
    fn new(work: Work<'_>, id: DeviceId) -> Self {
        let at = |stage: &StageId| work.placement[stage.index()] == id;
        let stages: Vec<_> = (0..work.placement.len()).map(StageId::at).filter(at).collect();
        let gradient = |stage: &StageId| {
            let hold = work.hold(Action::new(*stage, ActionKind::Backward, MicroBatchId(0)));
            hold.takes + hold.passing
        };
        // Every stage is counted with its gradients, as if it had started its backwards.
        let resident = |stage: &StageId| {
            let cost = &work.recipe.costs.stages[stage.index()];
            cost.lasting_bytes() + u128::from(cost.gradient_bytes)
        };
        Self {
            list: Vec::new(),
            free: 0.0,
            bytes: stages.iter().map(resident).sum(),
            limit: work.recipe.memory[id.index()].map_or(u128::MAX, u128::from),
            reserve: stages.iter().map(gradient).max().unwrap_or(0),
            stages,
        }
    }
}

impl StageProgress {
    fn note(&mut self, action: Action) {
        match action.kind {
            ActionKind::Forward => self.forwards += 1,
            ActionKind::InputGradient => self.weights.push(action.micro_batch),
            ActionKind::WeightGradient => drop(self.weights.pop()),
            ActionKind::Backward | ActionKind::Recompute => {}
        }
        self.gradients += usize::from(action.kind.passes_gradient());
        self.released += usize::from(action.kind.releases());
    }
}
