//! Local search: small changes to lists, kept if they improve the step.

use super::super::{Action, ActionKind, CostError};
use super::{Candidate, Work};

/// Change of one device's list.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// Replaces the input gradient at this position by the whole backward.
    Join(usize),
    /// Joins all split backwards without an action in between.
    JoinAll,
    /// Swaps the action at this position with the next one.
    Swap(usize),
    /// Moves the weight gradient from the first position to the second.
    Bring(usize, usize),
}

/// Tries up to `tries` changes, and keeps those that improve the step.
pub(super) fn improve(
    work: Work<'_>,
    mut best: Candidate,
    mut tries: usize,
) -> Result<Candidate, CostError> {
    let mut changed = true;
    while changed && tries > 0 {
        changed = false;
        for device in 0..best.lists.len() {
            for change in changes(&best.lists[device]) {
                let Some(list) = change.applied(&best.lists[device]) else { continue };
                let mut lists = best.lists.clone();
                lists[device] = list;
                tries = tries.saturating_sub(1);
                if let Some(found) =
                    Candidate::new(work, lists)?.filter(|found| found.is_better(&best))
                {
                    best = found;
                    changed = true;
                }
                if tries == 0 {
                    return Ok(best);
                }
            }
        }
    }
    Ok(best)
}

/// Returns all changes of a list, the change of many actions first.
fn changes(list: &[Action]) -> Vec<Change> {
    let mut changes = vec![Change::JoinAll];
    for (at, action) in list.iter().enumerate() {
        match action.kind {
            ActionKind::InputGradient => changes.push(Change::Join(at)),
            ActionKind::WeightGradient => {
                // A move by one position is a swap; bubbles are seldom far away.
                changes.extend(
                    (2..=6).filter_map(|far| Some(Change::Bring(at, at.checked_sub(far)?))),
                );
                changes.extend((2..=6).map(|far| Change::Bring(at, at + far)));
            }
            _ => {}
        }
        changes.push(Change::Swap(at));
    }
    changes
}

impl Change {
    /// Returns the changed list; `None` if the change has no effect.
    fn applied(self, list: &[Action]) -> Option<Vec<Action>> {
        match self {
            Self::JoinAll => Some(joined(list)).filter(|joined| joined.len() < list.len()),
            Self::Join(at) => {
                let input = *list.get(at).filter(|a| a.kind == ActionKind::InputGradient)?;
                let weight = Action { kind: ActionKind::WeightGradient, ..input };
                let mut list = list.to_vec();
                list[at].kind = ActionKind::Backward;
                list.retain(|action| *action != weight);
                Some(list)
            }
            Self::Swap(at) => {
                let (a, b) = (list.get(at)?, list.get(at + 1)?);
                let mut list = list.to_vec();
                list.swap(at, at + 1);
                (a.stage != b.stage || a.kind != b.kind).then_some(list)
            }
            Self::Bring(from, to) => {
                let transfers =
                    list.get(from)?.kind == ActionKind::WeightGradient && to < list.len();
                let mut list = list.to_vec();
                let action = transfers.then(|| list.remove(from))?;
                list.insert(to, action);
                Some(list)
            }
        }
    }
}

/// Joins all split backwards that have no action between input gradient and weight gradient.
fn joined(list: &[Action]) -> Vec<Action> {
    let mut joined: Vec<Action> = Vec::with_capacity(list.len());
    for &action in list {
        let input = Action { kind: ActionKind::InputGradient, ..action };
        match joined.last_mut() {
            Some(last) if action.kind == ActionKind::WeightGradient && *last == input => {
                last.kind = ActionKind::Backward;
            }
            _ => joined.push(action),
        }
    }
    joined
}
