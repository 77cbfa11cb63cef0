//! Makes the moves of one device's list.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Action, ActionKind, MicroBatchId, StageId};
use super::{Home, Move, MoveKind, StageHome};

/// The moves of a list, in the order in which they are started.
pub(super) fn moves(list: &[Action], homes: &[StageHome], slots: usize) -> Vec<Move> {
    let mut moves = weights(list, homes, slots);
    moves.extend(gradients(list, homes));
    moves.extend(boundaries(list, homes));
    // Stable: fetches that are started together keep the order in which they are needed.
    moves.sort_by_key(|one| (one.before, one.kind as u8));
    moves
}

/// A stage that lives on the host, at work until another such stage is.
struct Visit {
    stage: StageId,
    /// The number of the action after its last.
    end: usize,
}

/// After each visit the slots belong to the stages that are needed next, as many as there are slots.
/// What is there and among them stays; so a stage that leaves is always needed later than those that
/// come, which no other choice of who leaves can better.
fn weights(list: &[Action], homes: &[StageHome], slots: usize) -> Vec<Move> {
    let visits = visits(list, homes);
    let mut moves = Vec::new();
    let mut present: Vec<StageId> = Vec::new();
    for next in 0..=visits.len() {
        let before = next.checked_sub(1).map_or(0, |last| visits[last].end);
        let wanted = needed_next(&visits[next..], slots);
        let weights =
            |kind| move |&stage: &StageId| Move { kind, stage, micro_batch: None, before };
        let leave = present.iter().filter(|stage| !wanted.contains(stage));
        moves.extend(leave.map(weights(MoveKind::Release)));
        let come = wanted.iter().filter(|stage| !present.contains(stage));
        moves.extend(come.map(weights(MoveKind::Fetch)));
        present = wanted;
    }
    moves
}

fn visits(list: &[Action], homes: &[StageHome]) -> Vec<Visit> {
    let mut visits: Vec<Visit> = Vec::new();
    for (at, action) in list.iter().enumerate() {
        if homes[action.stage.index()].weights == Home::Device {
            continue;
        }
        match visits.last_mut().filter(|visit| visit.stage == action.stage) {
            Some(visit) => visit.end = at + 1,
            None => visits.push(Visit { stage: action.stage, end: at + 1 }),
        }
    }
    visits
}

/// The stages of the next visits, each once, at most `slots` of them.
fn needed_next(visits: &[Visit], slots: usize) -> Vec<StageId> {
    let mut stages = Vec::new();
    for visit in visits {
        if stages.len() == slots {
            break;
        }
        if !stages.contains(&visit.stage) {
            stages.push(visit.stage);
        }
    }
    stages
}

/// The gradients of each trained stage that lives on the host, after its last backward.
fn gradients(list: &[Action], homes: &[StageHome]) -> Vec<Move> {
    let mut last = BTreeMap::new();
    for (at, action) in list.iter().enumerate() {
        let home = homes[action.stage.index()];
        if action.kind.releases() && home.weights == Home::Host && home.trained {
            last.insert(action.stage, at);
        }
    }
    let leave = |(stage, at)| Move {
        kind: MoveKind::GradientsHome,
        stage,
        micro_batch: None,
        before: at + 1,
    };
    last.into_iter().map(leave).collect()
}

/// The boundaries that wait on the host. Only what is recomputed can: of anything else the activations
/// hold the input.
fn boundaries(list: &[Action], homes: &[StageHome]) -> Vec<Move> {
    let at_host = |action: &Action| homes[action.stage.index()].boundaries == Home::Host;
    let is_recompute = |action: &Action| action.kind == ActionKind::Recompute;
    let pair = |action: &Action| (action.stage, action.micro_batch);
    let recomputed: BTreeSet<_> =
        list.iter().filter(|a| is_recompute(a) && at_host(a)).map(pair).collect();
    let mut left: BTreeMap<(StageId, MicroBatchId), usize> = BTreeMap::new();
    let mut previous = None;
    let mut moves = Vec::new();
    for (at, action) in list.iter().enumerate() {
        if !recomputed.contains(&pair(action)) {
            continue;
        }
        if action.kind == ActionKind::Forward {
            left.insert(pair(action), at + 1);
        }
        if let Some(out) = left.get(&pair(action)).filter(|_| is_recompute(action)) {
            // While the recompute before this one runs, so that at most two are there.
            let back = previous.filter(|previous| previous > out).unwrap_or(at - 1);
            previous = Some(at);
            moves.extend(there_and_back(action, *out, back));
        }
    }
    moves
}

/// Nothing, where it would have to turn back at once.
fn there_and_back(action: &Action, out: usize, back: usize) -> Vec<Move> {
    if back <= out {
        return Vec::new();
    }
    let boundary = |kind, before| Move {
        kind,
        stage: action.stage,
        micro_batch: Some(action.micro_batch),
        before,
    };
    vec![boundary(MoveKind::BoundaryOut, out), boundary(MoveKind::BoundaryIn, back)]
}
