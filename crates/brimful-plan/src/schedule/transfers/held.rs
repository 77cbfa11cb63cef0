//! Memory of a device while actions and transfers are played.
//!
//! ```text
//! buffers       as large as the largest offloaded stage and the data of its update, all the time
//! sums          of an offloaded stage, from its first backward until the next stage's sums are sent
//! boundary      from its creation or arrival until the backward, except while it is offloaded
//! its gradient  from its creation or arrival until the backward that takes it, except while it is offloaded
//! ```
//!
//! Activations, working bytes of actions, and resident stages are counted as in `memory`.

use std::collections::{BTreeMap, BTreeSet};

use super::super::memory::{HeldAs, StageBefore, clamp};
use super::super::{Action, ActionKind, Actions, Costs, DeviceId, MicroBatchId, StageId};
use super::{Location, StageLocation, Transfers};

/// Bytes on one device, and their peak.
pub(super) struct HeldBytes {
    costs: Costs,
    locations: Vec<StageLocation>,
    /// Memory modes of the micro-batches of the device's stages.
    held_as: BTreeMap<(StageId, MicroBatchId), HeldAs>,
    /// Stages whose sums of gradients are, or were, on the device.
    summed: BTreeSet<StageId>,
    /// Whether stages are updated in the backward; false if no stage is offloaded.
    updates_in_backward: bool,
    /// Number of backwards that each stage still has to finish.
    left: BTreeMap<StageId, usize>,
    /// Stage whose sums were sent last.
    leaving: Option<StageId>,
    // 128 bits hold any sum of the 64-bit sizes.
    bytes: u128,
    peak_bytes: u128,
    held: usize,
    peak_held: usize,
    /// Bytes after each change.
    pub(super) levels: Vec<(f64, u64)>,
}

impl HeldBytes {
    pub(super) fn new(
        actions: &Actions,
        transfers: &Transfers,
        costs: &Costs,
        device: DeviceId,
    ) -> Self {
        let of_pair = |action: &Action| {
            let held = actions.held_of(*action);
            // An offloaded boundary comes back as a separate copy.
            let stays = transfers.locations()[action.stage.index()].boundaries == Location::Device;
            let before = if stays { held.before } else { StageBefore::Elsewhere };
            ((action.stage, action.micro_batch), HeldAs { before, ..held })
        };
        let held_as = actions.lists()[device.index()].iter().map(of_pair).collect();
        let bytes = lasting_bytes(actions, transfers, costs, device);
        let mut left = BTreeMap::new();
        for action in actions.lists()[device.index()].iter().filter(|a| a.kind.releases()) {
            *left.entry(action.stage).or_default() += 1;
        }
        let any_offloaded = transfers.locations().iter().any(|one| one.weights == Location::Host);
        Self {
            updates_in_backward: costs.update_in_backward && any_offloaded,
            left,
            costs: costs.clone(),
            locations: transfers.locations().to_vec(),
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

    /// Returns the bytes now.
    pub(super) fn now(&self) -> u64 {
        clamp(self.bytes)
    }

    /// Returns the peak bytes, and the largest number of activations.
    pub(super) fn peak(&self) -> (u64, usize) {
        (clamp(self.peak_bytes), self.peak_held)
    }

    /// Counts a boundary or its gradient that is made here, received from another device, or allocated for a
    /// copy from the host.
    pub(super) fn take(&mut self, time: f64, bytes: u64) {
        self.change(time, u128::from(bytes), 0);
    }

    /// Frees a boundary or its gradient, of which the host has a copy.
    pub(super) fn give(&mut self, time: f64, bytes: u64) {
        self.change(time, 0, u128::from(bytes));
    }

    pub(super) fn begin(&mut self, time: f64, action: Action) {
        let cost = *self.costs.of(action);
        let keeps = action.kind.keeps(self.is_recomputed(action));
        let mut takes = if keeps { u128::from(cost.activation_bytes) } else { 0 };
        // Inputs of later stages were counted when they arrived from the previous stage.
        if action.kind == ActionKind::Forward && action.stage == StageId(0) {
            takes += u128::from(self.costs.input_bytes);
        }
        if action.kind.passes_gradient() {
            takes += self.input_gradient(action) + self.loss_gradient(action);
        }
        let is_trained = self.locations[action.stage.index()].trained;
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
            // The gradient for the previous stage is counted again there, on arrival.
            gives += self.input_gradient(action) + u128::from(cost.output_bytes);
        }
        if action.kind.releases() {
            gives += u128::from(cost.activation_bytes)
                + u128::from(self.input_of(action.stage, action.micro_batch));
            self.held -= 1;
            gives += self.updated_gradients(action.stage);
        }
        self.change(time, 0, gives);
    }

    /// Counts a backward of the stage as finished. If stages are updated in the backward, and this was the last
    /// backward of a stage on the device, the update frees the stage's gradients. Returns their bytes, otherwise
    /// 0.
    fn updated_gradients(&mut self, stage: StageId) -> u128 {
        let left = self.left.entry(stage).or_insert(1);
        *left -= 1;
        let is_resident = self.locations[stage.index()].weights == Location::Device;
        let is_updated = *left == 0 && self.updates_in_backward && is_resident;
        match is_updated && self.summed.remove(&stage) {
            true => u128::from(self.costs.stages[stage.index()].gradient_bytes),
            false => 0,
        }
    }

    /// Ends the step: casts the sums of stages on the device to gradients, and frees the sums that were sent
    /// last.
    pub(super) fn finish(&mut self, time: f64) {
        let here = self
            .summed
            .iter()
            .filter(|stage| self.locations[stage.index()].weights == Location::Device);
        let casts = here.map(|stage| u128::from(self.costs.stages[stage.index()].cast_bytes)).sum();
        let left = self.leaving.take();
        let left = left.map_or(0, |stage| self.costs.stages[stage.index()].gradient_bytes);
        self.change(time, casts, u128::from(left));
    }

    /// Starts to send a stage's sums to the host, and frees the sums that were sent before them.
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

    /// Returns the bytes of a stage's input; 0 if the previous stage keeps it on this device.
    pub(super) fn input_of(&self, stage: StageId, micro_batch: MicroBatchId) -> u64 {
        let held = self.held_as.get(&(stage, micro_batch));
        let is_shared = held.is_some_and(|held| held.before == StageBefore::HereAndKept);
        if is_shared { 0 } else { self.costs.input_bytes_of(stage) }
    }

    /// Returns the bytes of the input's gradient; 0 for the first stage, whose input needs none.
    fn input_gradient(&self, action: Action) -> u128 {
        let is_first = action.stage == StageId(0);
        if is_first { 0 } else { u128::from(self.costs.input_bytes_of(action.stage)) }
    }

    /// Returns the bytes of the output's gradient if the loss makes it on this stage, the last one. Other stages
    /// receive this gradient from the next stage.
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

/// Returns the bytes of the resident stages, and of the device buffers for offloaded ones.
fn lasting_bytes(
    actions: &Actions,
    transfers: &Transfers,
    costs: &Costs,
    device: DeviceId,
) -> u128 {
    let stages = actions.placement().iter().zip(transfers.locations()).zip(&costs.stages);
    let here =
        stages.filter(|((at, _), _)| **at == device).map(|((_, location), cost)| (location, cost));
    let mut resident = 0;
    let mut fetched = Vec::new();
    let mut updated = Vec::new();
    for (location, cost) in here {
        match location.weights {
            Location::Device => resident += cost.lasting_bytes(),
            Location::Host => {
                fetched.push(u128::from(cost.fetched_bytes));
                updated.push(u128::from(cost.update_in_bytes));
            }
        }
    }
    let device_buffers = transfers.device_buffers().min(fetched.len());
    let largest = fetched.into_iter().max().unwrap_or(0) + updated.into_iter().max().unwrap_or(0);
    resident + device_buffers as u128 * largest
}
