//! Makes schedules from the measured times of stages, within the memory of the devices.
//!
//! Weight gradients fill the bubbles, because no other stage waits for them; memory limits how many can be
//! delayed. Several policies and the named schedules with the same placement are simulated with the stages' times.
//! Small changes then improve the shortest schedule that fits.

mod candidate;
mod greedy;
mod improve;
mod policy;

pub(super) use candidate::Candidate;

use super::{CostError, DeviceId, Recompute, ScheduleRecipe};
use policy::Policy;

/// Number of actions that are simulated for policies, and for changes. Both together take less than a tenth of a
/// second. If a step is too large to try all policies and changes, only the first ones are tried.
const POLICY_EFFORT: usize = 1 << 17;
const CHANGE_EFFORT: usize = 1 << 17;

/// Work to schedule, and its placement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work<'a> {
    /// Costs of each stage, and the memory of each device.
    pub(super) recipe: &'a ScheduleRecipe,
    /// Device of each stage.
    pub(super) placement: &'a [DeviceId],
    pub(super) micro_batches: usize,
    /// Recomputation of each stage.
    pub(super) recompute: &'a [Recompute],
}

/// Returns the best schedule found: the shortest that fits, or else the one with the smallest excess.
pub(super) fn best(work: Work<'_>) -> Result<Option<Candidate>, CostError> {
    let actions = work.placement.len() * work.micro_batches * 3;
    let tries = |effort: usize| (effort / actions).max(1);
    let mut best: Option<Candidate> = None;
    // Named schedules with the same placement of stages.
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
