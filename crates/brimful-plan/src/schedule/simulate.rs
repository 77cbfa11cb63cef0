//! Runs a schedule on paper: when each action begins and ends, and what each device holds.
//!
//! A device runs its actions in their order, each as soon as its input is there. Transfers run
//! beside the work, one at a time on each way between two devices; a sender never waits.

use super::memory;
use super::{
    Action, Actions, CostError, Costs, DeviceId, DeviceUse, LinkCost, Simulation, Span, StageId,
};

/// Simulates one step.
///
/// # Errors
/// Where the costs are not those of the schedule's stages, or are negative or no numbers.
pub fn simulate(actions: &Actions, costs: &Costs) -> Result<Simulation, CostError> {
    costs.check(actions.stages())?;
    let mut timeline = Simulator::new(actions, costs).run();
    // A device's actions are in order, so its last one ends last.
    let makespan =
        timeline.iter().filter_map(|spans| spans.last()).map(|s| s.end).fold(0.0, f64::max);
    if !makespan.is_finite() {
        return Err(CostError::Overflow);
    }
    let device = |spans: &mut Vec<Span>| {
        let busy = spans.iter().map(|span| costs.time(span.action)).sum();
        let (peak_bytes, peak_held) = memory::fill(actions, costs, spans);
        DeviceUse { busy, idle: f64::max(makespan - busy, 0.0), peak_bytes, peak_held }
    };
    let devices = timeline.iter_mut().map(device).collect();
    Ok(Simulation { timeline, devices, makespan, ..Simulation::default() })
}

/// The state of the run: every device as far as its inputs let it go.
struct Simulator<'a> {
    actions: &'a Actions,
    costs: &'a Costs,
    timeline: Vec<Vec<Span>>,
    arrivals: Arrivals,
    ways: Ways,
    awake: Vec<DeviceId>,
}

/// The ways between devices.
pub(super) struct Ways {
    link: LinkCost,
    /// For each device, the devices it sends to and when the way there is free.
    free: Vec<Vec<(DeviceId, f64)>>,
}

impl Ways {
    pub(super) fn new(devices: usize, link: LinkCost) -> Self {
        Self { link, free: vec![Vec::new(); devices] }
    }

    /// When the bytes are there; the way is taken as long as they are being sent.
    pub(super) fn transfer(&mut self, from: DeviceId, to: DeviceId, bytes: u64, end: f64) -> f64 {
        if from == to {
            return end;
        }
        // A device sends to few others, however many there are: a short list, not a table of pairs.
        let ways = &mut self.free[from.index()];
        let at = ways.iter().position(|(device, _)| *device == to).unwrap_or_else(|| {
            ways.push((to, 0.0));
            ways.len() - 1
        });
        // The way is busy while bytes are being sent, but not while they travel.
        let sent = f64::max(end, ways[at].1) + bytes as f64 / self.link.bandwidth;
        ways[at].1 = sent;
        sent + self.link.latency
    }
}

/// When what each stage takes of each micro-batch is there, boundaries and gradients; NaN before.
pub(super) struct Arrivals {
    micro_batches: usize,
    at: [Vec<f64>; 2],
}

impl Arrivals {
    pub(super) fn new(actions: &Actions) -> Self {
        let micro_batches = actions.micro_batches();
        let never = || vec![f64::NAN; actions.stages() * micro_batches];
        Self { micro_batches, at: [never(), never()] }
    }

    /// Of what the action takes where it is the stage's own, or makes where it is a neighbour's.
    pub(super) fn cell(&mut self, stage: StageId, action: Action) -> &mut f64 {
        let at = stage.index() * self.micro_batches + action.micro_batch.index();
        &mut self.at[action.channel()][at]
    }
}

impl<'a> Simulator<'a> {
    fn new(actions: &'a Actions, costs: &'a Costs) -> Self {
        let lists = actions.lists();
        Self {
            actions,
            costs,
            timeline: lists.iter().map(|list| Vec::with_capacity(list.len())).collect(),
            arrivals: Arrivals::new(actions),
            ways: Ways::new(lists.len(), costs.link),
            awake: (0..lists.len()).rev().map(DeviceId::at).collect(),
        }
    }

    /// Validated actions never come to a halt before their end.
    fn run(mut self) -> Vec<Vec<Span>> {
        // In whatever order the devices are looked at, the times come out the same: an action's start
        // depends on its device's action before and on its own input alone. So no queue of events is
        // needed; a device runs as far as it can, and is looked at again when an input arrives.
        while let Some(device) = self.awake.pop() {
            while self.advance(device) {}
        }
        self.timeline
    }

    fn advance(&mut self, device: DeviceId) -> bool {
        let done = &self.timeline[device.index()];
        let Some(&action) = self.actions.lists()[device.index()].get(done.len()) else {
            return false;
        };
        let free = done.last().map_or(0.0, |span| span.end);
        let ready = self.ready(action);
        // Nobody has sent it yet: who does will wake this device.
        if ready.is_nan() {
            return false;
        }
        let start = f64::max(free, ready);
        let end = start + self.costs.time(action);
        self.timeline[device.index()].push(Span { action, start, end, bytes: 0 });
        self.deliver(action, device, end);
        true
    }

    /// When what the action needs from another stage is there.
    fn ready(&mut self, action: Action) -> f64 {
        match action.source(self.actions.last_stage()) {
            Some(_) => *self.arrivals.cell(action.stage, action),
            None => 0.0,
        }
    }

    /// Hands the action's output to the stage that waits for it.
    fn deliver(&mut self, action: Action, from: DeviceId, end: f64) {
        let Some(target) = action.target(self.actions.last_stage()) else { return };
        let to = self.actions.placement()[target.index()];
        // The gradient of a boundary has the boundary's size, so both directions are billed by the
        // output of the earlier stage.
        let bytes = self.costs.stages[action.stage.min(target).index()].output_bytes;
        *self.arrivals.cell(target, action) = self.ways.transfer(from, to, bytes, end);
        if to != from {
            self.awake.push(to);
        }
    }
}
