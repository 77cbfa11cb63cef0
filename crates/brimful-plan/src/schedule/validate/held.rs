//! How many micro-batches' activations each stage holds at one time.

use super::super::{Action, ActionKind};
use super::order::Order;

/// The most micro-batches that each stage holds.
pub(super) fn count(lists: &[Vec<Action>], order: &Order) -> Vec<usize> {
    let mut now = vec![0; order.device_of.len()];
    let mut most = vec![0; now.len()];
    for &Action { stage, kind, micro_batch } in lists.iter().flatten() {
        let j = stage.index();
        let is_recomputed = order.done(stage, micro_batch).has(ActionKind::Recompute);
        now[j] += usize::from(kind.keeps(is_recomputed));
        most[j] = most[j].max(now[j]);
        // Only after the maximum is taken: what a backward needs is there until it ends.
        now[j] -= usize::from(kind.releases());
    }
    most
}
