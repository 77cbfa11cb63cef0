//! Reorders actions so that one place in each channel is enough.
//!
//! If micro-batches go round the devices several times, the plainest order lets some of them queue between two
//! devices. These functions find another order, which is as short or nearly as short. In this order no device
//! waits for ever, although a full channel blocks its sender.

mod device;
mod list_scheduler;

use super::{Action, Actions, Costs, simulate};
pub(super) use device::Rank;
pub(super) use list_scheduler::reorder;

/// Returns the lists with the shortest step, at one tick per action; the first of equal ones.
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
