//! Validates lists of actions, and determines what they need.

mod channels;
mod order;
mod violation;

use super::{Action, ActionKind};
use order::Order;
use violation::Violation;

/// Facts about valid lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) order: Order,
    /// Largest number of micro-batches whose activations each stage holds at one time.
    pub(super) held: Vec<usize>,
    pub(super) channel_capacity: usize,
}

/// Checks every rule; returns the first broken one.
pub(super) fn facts(lists: &[Vec<Action>]) -> Result<Facts, Violation> {
    let order = order::check(lists)?;
    let channel_capacity = channels::check(lists, &order)?;
    let held = most_held(lists, &order);
    Ok(Facts { order, held, channel_capacity })
}

fn most_held(lists: &[Vec<Action>], order: &Order) -> Vec<usize> {
    let mut now = vec![0; order.device_of.len()];
    let mut most = vec![0; now.len()];
    for &Action { stage, kind, micro_batch } in lists.iter().flatten() {
        let j = stage.index();
        let is_recomputed = order.done(stage, micro_batch).has(ActionKind::Recompute);
        now[j] += usize::from(kind.keeps(is_recomputed));
        most[j] = most[j].max(now[j]);
        // Only after the maximum is taken: a backward needs its activations until it ends.
        now[j] -= usize::from(kind.releases());
    }
    most
}

/// Returns whether the lists can be run with one place in each channel.
pub(super) fn one_place_suffices(lists: &[Vec<Action>]) -> bool {
    order::check(lists).is_ok_and(|order| channels::check_with(lists, &order, 1).is_ok())
}
