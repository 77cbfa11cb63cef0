//! What a device holds while actions and moves are played.
//!
//! ```text
//! slots        as large as the largest stage that lives on the host, all the time
//! gradients    of a stage that lives on the host, from its first backward until they are home
//! boundary     from its making or arrival until the backward, without the time that it spends on the host
//! its gradient from its making or arrival until the backward that takes it, without that time
//! ```
//!
//! Activations, and all that lives on the device, as in `memory`.

use std::collections::BTreeSet;

use super::super::{Action, ActionKind, Actions, Costs, DeviceId, MicroBatchId, StageId};
use super::{Home, Move, MoveKind, Moves, StageHome};

/// The bytes on one device, and the most there were.
pub(super) struct HeldBytes {
    costs: Costs,
    homes: Vec<StageHome>,
    recomputed: BTreeSet<(StageId, MicroBatchId)>,
    /// Stages that live on the host and have gradients on the device.
    summed: BTreeSet<StageId>,
    // 128 bits hold any sum of the 64-bit sizes.
    bytes: u128,
    peak_bytes: u128,
    held: usize,
    peak_held: usize,
    levels: Vec<(f64, u64)>,
}

impl HeldBytes {
    pub(super) fn new(actions: &Actions, moves: &Moves, costs: &Costs, device: DeviceId) -> Self {
        let recompute = |action: &&Action| action.kind == ActionKind::Recompute;
        let recomputed = actions.lists()[device.index()].iter().filter(recompute);
        let bytes = lasting_bytes(actions, moves, costs, device);
        Self {
            costs: costs.clone(),
            homes: moves.homes().to_vec(),
            recomputed: recomputed.map(|action| (action.stage, action.micro_batch)).collect(),
            summed: BTreeSet::new(),
            bytes,
            peak_bytes: bytes,
            held: 0,
            peak_held: 0,
            levels: vec![(0.0, clamp(bytes))],
        }
    }

    /// The bytes now.
    pub(super) fn now(&self) -> u64 {
        clamp(self.bytes)
    }

    /// The most bytes, and the most activations.
    pub(super) fn peak(&self) -> (u64, usize) {
        (clamp(self.peak_bytes), self.peak_held)
    }

    /// The bytes after each change.
    pub(super) fn levels(&self) -> &[(f64, u64)] {
        &self.levels
    }

    /// A boundary or its gradient is there: made, or come from another device.
    pub(super) fn take(&mut self, time: f64, bytes: u64) {
        self.change(time, u128::from(bytes), 0);
    }

    pub(super) fn begin(&mut self, time: f64, action: Action) {
        let cost = self.costs.stages[action.stage.index()];
        let keeps = self.keeps(action);
        let mut takes = if keeps { u128::from(cost.activation_bytes) } else { 0 };
        // Those of later stages came from the stage before.
        if action.kind == ActionKind::Forward && action.stage == StageId(0) {
            takes += u128::from(self.costs.input_bytes);
        }
        if action.kind.passes_gradient() {
            takes += self.input_gradient(action) + self.loss_gradient(action);
        }
        let home = self.homes[action.stage.index()];
        let sums = action.kind.releases() && home.weights == Home::Host && home.trained;
        if sums && self.summed.insert(action.stage) {
            takes += u128::from(cost.gradient_bytes);
        }
        self.held += usize::from(keeps);
        self.peak_held = self.peak_held.max(self.held);
        self.change(time, takes, 0);
    }

    pub(super) fn end(&mut self, time: f64, action: Action) {
        let cost = self.costs.stages[action.stage.index()];
        let mut gives = 0;
        if action.kind.passes_gradient() {
            // What goes on to the stage before is taken again there, by its arrival.
            gives += self.input_gradient(action) + u128::from(cost.output_bytes);
        }
        if action.kind.releases() {
            gives += u128::from(cost.activation_bytes)
                + u128::from(self.costs.input_bytes_of(action.stage));
            self.held -= 1;
        }
        self.change(time, 0, gives);
    }

    /// A boundary is let go of: the host has it.
    pub(super) fn drop(&mut self, time: f64, stage: StageId) {
        self.change(time, 0, u128::from(self.costs.input_bytes_of(stage)));
    }

    /// A boundary or its gradient begins to come back.
    pub(super) fn come(&mut self, time: f64, moved: Move) {
        self.change(time, u128::from(self.costs.input_bytes_of(moved.stage)), 0);
    }

    /// A stage's gradients, a boundary or its gradient are on the host.
    pub(super) fn leave(&mut self, time: f64, moved: Move) {
        let bytes = match moved.kind {
            MoveKind::GradientsHome => self.costs.stages[moved.stage.index()].gradient_bytes,
            _ => self.costs.input_bytes_of(moved.stage),
        };
        self.change(time, 0, u128::from(bytes));
    }

    fn keeps(&self, action: Action) -> bool {
        match action.kind {
            ActionKind::Forward => !self.recomputed.contains(&(action.stage, action.micro_batch)),
            kind => kind == ActionKind::Recompute,
        }
    }

    /// Of its input, the first stage makes no gradient: nobody is before it.
    fn input_gradient(&self, action: Action) -> u128 {
        let is_first = action.stage == StageId(0);
        if is_first { 0 } else { u128::from(self.costs.input_bytes_of(action.stage)) }
    }

    /// The last stage's output gradient is the loss's; to others it comes from the stage after.
    fn loss_gradient(&self, action: Action) -> u128 {
        let is_last = action.stage.index() + 1 == self.costs.stages.len();
        if is_last { u128::from(self.costs.stages[action.stage.index()].output_bytes) } else { 0 }
    }

    fn change(&mut self, time: f64, takes: u128, gives: u128) {
        if takes == gives {
            return;
        }
        self.bytes = self.bytes + takes - gives;
        self.peak_bytes = self.peak_bytes.max(self.bytes);
        self.levels.push((time, clamp(self.bytes)));
    }
}

/// What lives on the device, and the slots for what does not.
fn lasting_bytes(actions: &Actions, moves: &Moves, costs: &Costs, device: DeviceId) -> u128 {
    let stages = actions.placement().iter().zip(moves.homes()).zip(&costs.stages);
    let here = stages.filter(|((at, _), _)| **at == device).map(|((_, home), cost)| (home, cost));
    let mut resident = 0;
    let mut fetched = Vec::new();
    for (home, cost) in here {
        match home.weights {
            Home::Device => resident += cost.resident_bytes(),
            Home::Host => fetched.push(u128::from(cost.fetched_bytes)),
        }
    }
    let slots = moves.slots().min(fetched.len());
    resident + slots as u128 * fetched.into_iter().max().unwrap_or(0)
}

fn clamp(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
