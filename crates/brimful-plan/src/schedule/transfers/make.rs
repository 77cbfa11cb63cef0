//! Makes the transfers of one device's list.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Action, ActionKind, MicroBatchId, StageId};
use super::{Location, Payload, StageLocation, Transfer, TransferKind};

/// Returns the transfers of a list, in the order in which they start.
pub(super) fn transfers(
    list: &[Action],
    locations: &[StageLocation],
    device_buffers: usize,
) -> Vec<Transfer> {
    let mut transfers = weights(list, locations, device_buffers);
    transfers.extend(gradients(list, locations));
    transfers.extend(boundaries(list, locations));
    // The sort is stable: fetches that start together keep the order in which they are needed.
    transfers.sort_by_key(|one| (one.before, one.kind as u8));
    transfers
}

/// Consecutive actions of an offloaded stage, until another offloaded stage acts.
struct Visit {
    stage: StageId,
    /// Index of the action after the last one of the visit.
    end: usize,
}

/// Makes fetches and releases. After each visit the device buffers belong to the stages that are needed next, as
/// many as there are buffers. Stages that are already in a buffer stay there. So a released stage is always needed
/// later than the fetched ones, and no other choice needs fewer fetches.
fn weights(list: &[Action], locations: &[StageLocation], device_buffers: usize) -> Vec<Transfer> {
    let visits = visits(list, locations);
    let mut transfers = Vec::new();
    let mut present: Vec<StageId> = Vec::new();
    for next in 0..=visits.len() {
        let before = next.checked_sub(1).map_or(0, |last| visits[last].end);
        let wanted = needed_next(&visits[next..], device_buffers);
        let weights =
            |kind| move |&stage: &StageId| Transfer { kind, stage, micro_batch: None, before };
        let leave = present.iter().filter(|stage| !wanted.contains(stage));
        transfers.extend(leave.map(weights(TransferKind::Release)));
        let come = wanted.iter().filter(|stage| !present.contains(stage));
        transfers.extend(come.map(weights(TransferKind::Fetch)));
        present = wanted;
    }
    transfers
}

fn visits(list: &[Action], locations: &[StageLocation]) -> Vec<Visit> {
    let mut visits: Vec<Visit> = Vec::new();
    for (at, action) in list.iter().enumerate() {
        if locations[action.stage.index()].weights == Location::Device {
            continue;
        }
        match visits.last_mut().filter(|visit| visit.stage == action.stage) {
            Some(visit) => visit.end = at + 1,
            None => visits.push(Visit { stage: action.stage, end: at + 1 }),
        }
    }
    visits
}

/// Returns the stages of the next visits, each once, at most `device_buffers` of them.
fn needed_next(visits: &[Visit], device_buffers: usize) -> Vec<StageId> {
    let mut stages = Vec::new();
    for visit in visits {
        if stages.len() == device_buffers {
            break;
        }
        if !stages.contains(&visit.stage) {
            stages.push(visit.stage);
        }
    }
    stages
}

/// Makes the gradient transfers of each trained offloaded stage, after its last backward.
fn gradients(list: &[Action], locations: &[StageLocation]) -> Vec<Transfer> {
    let mut last = BTreeMap::new();
    for (at, action) in list.iter().enumerate() {
        let location = locations[action.stage.index()];
        if action.kind.releases() && location.weights == Location::Host && location.trained {
            last.insert(action.stage, at);
        }
    }
    let leave = |(stage, at)| Transfer {
        kind: TransferKind::OffloadGradients,
        stage,
        micro_batch: None,
        before: at + 1,
    };
    last.into_iter().map(leave).collect()
}

/// Returns each stage and micro-batch whose input is freed between forward and recompute, because the
/// stage's boundaries are offloaded. An input that would have to come back at once is not freed. Without a
/// recompute, the kept activations hold the input.
pub(super) fn waiting(
    list: &[Action],
    locations: &[StageLocation],
) -> BTreeSet<(StageId, MicroBatchId)> {
    let mut forwards = BTreeMap::new();
    let mut waiting = BTreeSet::new();
    for (at, action) in list.iter().enumerate() {
        let pair = (action.stage, action.micro_batch);
        if action.kind == ActionKind::Forward {
            forwards.insert(pair, at);
        }
        let is_recompute =
            action.kind == ActionKind::Recompute && waits_on_host(locations, action.stage);
        if is_recompute && forwards.get(&pair).is_some_and(|forward| forward + 2 < at) {
            waiting.insert(pair);
        }
    }
    waiting
}

/// Returns whether the stage's input is offloaded; false for the stage after the last.
pub(super) fn waits_on_host(locations: &[StageLocation], stage: StageId) -> bool {
    locations.get(stage.index()).is_some_and(|location| location.boundaries == Location::Host)
}

/// Makes the transfers of offloaded boundaries and their gradients. They are sent to the host as soon as they are
/// made. They come back during the action before the one that needs them, so at most two of each kind are on the
/// device. Data that another device has sent to the host come back only when an action needs them.
fn boundaries(list: &[Action], locations: &[StageLocation]) -> Vec<Transfer> {
    let mut boundary_transfers = BoundaryTransfers { transfers: Vec::new(), left: BTreeMap::new() };
    let waiting = waiting(list, locations);
    for (at, action) in list.iter().enumerate() {
        let (stage, next) = (action.stage, StageId(action.stage.0 + 1));
        let (here, after) = (waits_on_host(locations, stage), waits_on_host(locations, next));
        let is_first = stage == StageId(0);
        let waits = waiting.contains(&(stage, action.micro_batch));
        let micro_batch = Some(action.micro_batch);
        let bring = |kind, stage| Transfer { kind, stage, micro_batch, before: at };
        let send = |kind, stage| Transfer { kind, stage, micro_batch, before: at + 1 };
        match action.kind {
            ActionKind::Forward => {
                boundary_transfers
                    .bring_if(here && !is_first, bring(TransferKind::BoundaryIn, stage));
                boundary_transfers
                    .send_if(waits && is_first, send(TransferKind::BoundaryOut, stage));
                boundary_transfers.send_if(after, send(TransferKind::BoundaryOut, next));
            }
            ActionKind::Recompute => {
                boundary_transfers.bring_if(waits, bring(TransferKind::BoundaryIn, stage))
            }
            kind if kind.passes_gradient() => {
                boundary_transfers.bring_if(after, bring(TransferKind::GradientIn, next));
                boundary_transfers
                    .send_if(here && !is_first, send(TransferKind::GradientOut, stage));
            }
            _ => {}
        }
    }
    boundary_transfers.transfers
}

/// Collected transfers of boundaries.
struct BoundaryTransfers {
    transfers: Vec<Transfer>,
    /// Index of the action before which each boundary or gradient was sent.
    left: BTreeMap<Payload, usize>,
}

impl BoundaryTransfers {
    fn send_if(&mut self, is_so: bool, one: Transfer) {
        if is_so {
            self.left.insert(Payload::of(one), one.before);
            self.transfers.push(one);
        }
    }

    fn bring_if(&mut self, is_so: bool, one: Transfer) {
        if is_so {
            let left = self.left.get(&Payload::of(one));
            let ahead = |left: &usize| (*left).max(one.before.saturating_sub(1));
            self.transfers.push(Transfer { before: left.map_or(one.before, ahead), ..one });
        }
    }
}
