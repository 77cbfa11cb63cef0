//! Finds out whether lists of actions can be run, and what they need.

mod channels;
mod held;
mod order;
mod violation;

use super::Action;
use order::Order;
use violation::Violation;

/// What is known of lists that can be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) order: Order,
    pub(super) held: Vec<usize>,
    pub(super) channel_capacity: usize,
}

/// Checks every rule; the first one broken is returned.
pub(super) fn facts(lists: &[Vec<Action>]) -> Result<Facts, Violation> {
    let order = order::check(lists)?;
    let channel_capacity = channels::check(lists, &order)?;
    let held = held::count(lists, &order);
    Ok(Facts { order, held, channel_capacity })
}

/// Whether lists can be run with one place in each channel.
pub(super) fn one_place_suffices(lists: &[Vec<Action>]) -> bool {
    order::check(lists).is_ok_and(|order| channels::check_with(lists, &order, 1).is_ok())
}
