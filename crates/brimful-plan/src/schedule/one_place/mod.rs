//! Orders of actions that get by with one place in each channel.
//!
//! Where micro-batches go round the devices several times, the plainest order lets some of them
//! queue between two devices. These functions find another one that is as short, or nearly so, in
//! which nobody waits for ever while a full channel blocks its sender.

mod device;
mod list_scheduler;

use super::{Action, Actions, Costs, simulate};
pub(super) use device::Rank;
pub(super) use list_scheduler::reorder;

/// The lists with the shortest step, an action a tick; the first of equal ones.
pub(super) fn shortest(
    candidates: impl IntoIterator<Item = Vec<Vec<Action>>>,
) -> Option<Vec<Vec<Action>>> {
    let timed = candidates.into_iter().filter_map(|lists| Some((makespan(&lists)?, lists)));
    timed.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, lists)| lists)
}

fn makespan(lists: &[Vec<Action>]) -> Option<f64> {
    let actions = Actions::new(lists.to_vec()).ok()?;
    let costs = Costs::ticks(actions.stages());
    simulate(&actions, &costs).ok().map(|simulation| simulation.makespan())
}
