//! Simulates schedules: start and end of each action, and memory of each device.
//!
//! A device runs its actions in order, each as soon as its input has arrived. Transfers overlap with
//! compute, one at a time on each link between two devices; a sender never waits.

use super::memory;
use super::{
    Action, Actions, CostError, Costs, DeviceId, DeviceUse, LinkCost, Simulation, Span, StageId,
};

/// Simulates one step.
///
/// # Errors
/// If the costs do not match the schedule's stages, or one is negative or NaN.
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

/// State of a simulation, in which every device runs as far as its inputs allow.
struct Simulator<'a> {
    actions: &'a Actions,
    costs: &'a Costs,
    timeline: Vec<Vec<Span>>,
    arrivals: Arrivals,
    ways: Ways,
    awake: Vec<DeviceId>,
}

/// Links between devices.
pub(super) struct Ways {
    link: LinkCost,
    /// For each device, the devices that it sends to and the times at which those links are free.
    free: Vec<Vec<(DeviceId, f64)>>,
}

impl Ways {
    pub(super) fn new(devices: usize, link: LinkCost) -> Self {
        Self { link, free: vec![Vec::new(); devices] }
    }

    /// Returns the arrival time of the bytes; the link is busy while they are being sent.
    pub(super) fn transfer(&mut self, from: DeviceId, to: DeviceId, bytes: u64, end: f64) -> f64 {
        if from == to {
            return end;
        }
        // A device sends to only a few others, so a short list replaces a table of all pairs.
        let ways = &mut self.free[from.index()];
        let at = ways.iter().position(|(device, _)| *device == to).unwrap_or_else(|| {
            ways.push((to, 0.0));
            ways.len() - 1
        });
        // The link is busy while bytes are being sent, but not during the latency.
        let sent = f64::max(end, ways[at].1) + bytes as f64 / self.link.bandwidth;
        ways[at].1 = sent;
        sent + self.link.latency
    }
}

/// Arrival times of the boundaries and gradients that each stage takes; NaN before they are sent.
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

    /// Returns the arrival time of the action's input if `stage` is the action's own. If `stage` is the neighbour
    /// that takes the action's output, returns the arrival time of the output.
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

    /// Runs all actions, which are validated, so no device waits for ever.
    fn run(mut self) -> Vec<Vec<Span>> {
        // The times do not depend on the order in which devices are visited: an action's start depends only on its
        // own input and on the previous action of its device. So no event queue is needed; a device runs as far as
        // it can, and is visited again when an input arrives.
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
        // The input is not sent yet: its sender will wake this device.
        if ready.is_nan() {
            return false;
        }
        let start = f64::max(free, ready);
        let end = start + self.costs.time(action);
        self.timeline[device.index()].push(Span { action, start, end, bytes: 0 });
        self.deliver(action, device, end);
        true
    }

    /// Returns the arrival time of the action's input from another stage.
    fn ready(&mut self, action: Action) -> f64 {
        match action.source(self.actions.last_stage()) {
            Some(_) => *self.arrivals.cell(action.stage, action),
            None => 0.0,
        }
    }

    /// Passes the action's output to the stage that waits for it.
    fn deliver(&mut self, action: Action, from: DeviceId, end: f64) {
        let Some(target) = action.target(self.actions.last_stage()) else { return };
        let to = self.actions.placement()[target.index()];
        // The gradient of a boundary has the boundary's size, so both directions use the output bytes of
        // the earlier stage.
        let bytes = self.costs.stages[action.stage.min(target).index()].output_bytes;
        *self.arrivals.cell(target, action) = self.ways.transfer(from, to, bytes, end);
        if to != from {
            self.awake.push(to);
        }
    }
}
