//! How many micro-batches' activations each stage holds at one time.

use super::super::{Action, ActionKind};
use super::order::Order;

/// The most micro-batches that a stage holds, and where in its device's list it first holds so
/// many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) most: usize,
    pub(crate) at: usize,
}

pub(super) fn count(lists: &[Vec<Action>], order: &Order) -> Vec<Held> {
    let mut now = vec![0; order.device_of.len()];
    let mut held = vec![Held::default(); now.len()];
    for list in lists {
        for (at, &action) in list.iter().enumerate() {
            let j = action.stage.index();
            if takes_hold(action, order) {
                now[j] += 1;
            }
            if now[j] > held[j].most {
                held[j] = Held { most: now[j], at };
            }
            // Only after the maximum is taken: what a backward needs is there until it ends.
            if action.kind.releases() {
                now[j] -= 1;
            }
        }
    }
    held
}

/// A forward that will run again keeps only its input; the recompute keeps the rest.
fn takes_hold(action: Action, order: &Order) -> bool {
    let recomputed = || order.done(action.stage, action.micro_batch).has(ActionKind::Recompute);
    match action.kind {
        ActionKind::Forward => !recomputed(),
        kind => kind == ActionKind::Recompute,
    }
}
