//! What a device holds while actions and moves are played.
//!
//! ```text
//! slots        as large as the largest stage that lives on the host, all the time
//! sums         of a stage that lives on the host, from its first backward until the next one's set out
//! boundary     from its making or arrival until the backward, without the time that it spends on the host
//! its gradient from its making or arrival until the backward that takes it, without that time
//! ```
//!
//! Activations, what actions work with, and all that lives on the device, as in `memory`.

use std::collections::{BTreeMap, BTreeSet};

use super::super::memory::{HeldAs, StageBefore, clamp};
use super::super::{Action, ActionKind, Actions, Costs, DeviceId, MicroBatchId, StageId};
use super::{Home, Moves, StageHome};

/// The bytes on one device, and the most there were.
pub(super) struct HeldBytes {
    costs: Costs,
    homes: Vec<StageHome>,
    /// How the device's stages hold their micro-batches.
    held_as: BTreeMap<(StageId, MicroBatchId), HeldAs>,
    /// Stages whose sums of gradients are, or were, on the device.
    summed: BTreeSet<StageId>,
    /// The stage whose sums have set out last.
    leaving: Option<StageId>,
    // 128 bits hold any sum of the 64-bit sizes.
    bytes: u128,
    peak_bytes: u128,
    held: usize,
    peak_held: usize,
    /// The bytes after each change.
    pub(super) levels: Vec<(f64, u64)>,
}

impl HeldBytes {
    pub(super) fn new(actions: &Actions, moves: &Moves, costs: &Costs, device: DeviceId) -> Self {
        let of_pair = |action: &Action| {
            let held = actions.held_of(*action);
            // What waits on the host comes back as a copy of its own.
            let stays = moves.homes()[action.stage.index()].boundaries == Home::Device;
            let before = if stays { held.before } else { StageBefore::Elsewhere };
            ((action.stage, action.micro_batch), HeldAs { before, ..held })
        };
        let held_as = actions.lists()[device.index()].iter().map(of_pair).collect();
        let bytes = lasting_bytes(actions, moves, costs, device);
        Self {
            costs: costs.clone(),
            homes: moves.homes().to_vec(),
            held_as,
            summed: BTreeSet::new(),
            leaving: None,
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

    /// A boundary or its gradient is there, made or come from another device, or its room is, if it is to come back.
    pub(super) fn take(&mut self, time: f64, bytes: u64) {
        self.change(time, u128::from(bytes), 0);
    }

    /// A boundary or its gradient is let go of: the host has it.
    pub(super) fn give(&mut self, time: f64, bytes: u64) {
        self.change(time, 0, u128::from(bytes));
    }

    pub(super) fn begin(&mut self, time: f64, action: Action) {
        let cost = *self.costs.of(action);
        let keeps = action.kind.keeps(self.is_recomputed(action));
        let mut takes = if keeps { u128::from(cost.activation_bytes) } else { 0 };
        // Those of later stages came from the stage before.
        if action.kind == ActionKind::Forward && action.stage == StageId(0) {
            takes += u128::from(self.costs.input_bytes);
        }
        if action.kind.passes_gradient() {
            takes += self.input_gradient(action) + self.loss_gradient(action);
        }
        let is_trained = self.homes[action.stage.index()].trained;
        if action.kind.releases() && is_trained && self.summed.insert(action.stage) {
            takes += u128::from(cost.gradient_bytes);
        }
        self.held += usize::from(keeps);
        self.peak_held = self.peak_held.max(self.held);
        self.change(time, takes + self.working(action), 0);
    }

    pub(super) fn end(&mut self, time: f64, action: Action) {
        let cost = *self.costs.of(action);
        let mut gives = self.working(action);
        if action.kind.passes_gradient() {
            // What goes on to the stage before is taken again there, by its arrival.
            gives += self.input_gradient(action) + u128::from(cost.output_bytes);
        }
        if action.kind.releases() {
            gives += u128::from(cost.activation_bytes)
                + u128::from(self.input_of(action.stage, action.micro_batch));
            self.held -= 1;
        }
        self.change(time, 0, gives);
    }

    /// All is done: sums become gradients where their stage lives on the device.
    pub(super) fn finish(&mut self, time: f64) {
        let here =
            self.summed.iter().filter(|stage| self.homes[stage.index()].weights == Home::Device);
        let casts = here.map(|stage| u128::from(self.costs.stages[stage.index()].cast_bytes)).sum();
        let left = self.leaving.take();
        let left = left.map_or(0, |stage| self.costs.stages[stage.index()].gradient_bytes);
        self.change(time, casts, u128::from(left));
    }

    /// A stage's sums set out for the host: those that set out before them are given up.
    pub(super) fn set_out(&mut self, time: f64, stage: StageId) {
        if let Some(before) = self.leaving.replace(stage) {
            let bytes = u128::from(self.costs.stages[before.index()].gradient_bytes);
            self.change(time, 0, bytes);
        }
    }

    fn is_recomputed(&self, action: Action) -> bool {
        let held = self.held_as.get(&(action.stage, action.micro_batch));
        held.is_some_and(|held| held.is_recomputed)
    }

    fn working(&self, action: Action) -> u128 {
        self.costs.working_bytes(action, self.is_recomputed(action))
    }

    /// The bytes of what enters a stage, where it is not what the stage before has kept.
    pub(super) fn input_of(&self, stage: StageId, micro_batch: MicroBatchId) -> u64 {
        let held = self.held_as.get(&(stage, micro_batch));
        let is_shared = held.is_some_and(|held| held.before == StageBefore::HereAndKept);
        if is_shared { 0 } else { self.costs.input_bytes_of(stage) }
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
            Home::Device => resident += cost.lasting_bytes(),
            Home::Host => fetched.push(u128::from(cost.fetched_bytes)),
        }
    }
    let slots = moves.slots().min(fetched.len());
    resident + slots as u128 * fetched.into_iter().max().unwrap_or(0)
}
