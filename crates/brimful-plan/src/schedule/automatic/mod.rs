//! Makes lists for the times that stages really take, within the memory that devices have.
//!
//! A bubble is filled with what nobody waits for: weight gradients, as many as the memory lets wait for
//! one. Several policies are played by the stages' times, and so are the named schedules of the same
//! placement; the shortest list that fits is then improved by small changes, and taken.

mod candidate;
mod greedy;
mod improve;
mod policy;

pub(super) use candidate::Candidate;

use super::{CostError, DeviceId, Recompute, ScheduleRecipe};
use policy::Policy;

/// How many actions are simulated for policies, and for changes: together less than a tenth of a second's work. Of
/// a step so large that not all can be tried within it, the first ones are.
const POLICY_EFFORT: usize = 1 << 17;
const CHANGE_EFFORT: usize = 1 << 17;

/// What is to be done, and where.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work<'a> {
    /// What it costs on each stage, and how many bytes each device has.
    pub(super) recipe: &'a ScheduleRecipe,
    /// The device of each stage.
    pub(super) placement: &'a [DeviceId],
    pub(super) micro_batches: usize,
    /// What each stage recomputes.
    pub(super) recompute: &'a [Recompute],
}

/// The best list that is found: the shortest that fits, or else the one that lacks the least memory.
pub(super) fn best(work: Work<'_>) -> Result<Option<Candidate>, CostError> {
    let actions = work.placement.len() * work.micro_batches * 3;
    let tries = |effort: usize| (effort / actions).max(1);
    let mut best: Option<Candidate> = None;
    // Those that place the stages as they are here.
    let named = work.recipe.schedule.alike().into_iter();
    let named = named.map(|named| named.lists(work.recipe.memory.len(), work.micro_batches));
    let played =
        Policy::all().take(tries(POLICY_EFFORT)).filter_map(|policy| greedy::play(work, policy));
    for lists in named.chain(played) {
        let Some(found) = Candidate::new(work, lists)? else { continue };
        if best.as_ref().is_none_or(|best| found.is_better(best)) {
            best = Some(found);
        }
    }
    best.map(|best| improve::improve(work, best, tries(CHANGE_EFFORT))).transpose()
}
