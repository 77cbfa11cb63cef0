//! Recipe of automatic schedules: the costs of unequal stages, and the devices' memory.

use serde::{Deserialize, Serialize};

use super::automatic::{self, Work};
use super::{Actions, Costs, Recompute, Schedule, ScheduleError, StageId};

/// Inputs of [`Schedule::Auto`]: the costs of a micro-batch on each stage, the placement of the stages, and the
/// memory of each device. The recipe makes lists for any number of micro-batches.
///
/// ```
/// use brimful_plan::schedule::{Costs, Recompute, Schedule, StageCost, simulate};
/// use brimful_plan::schedule::{ScheduleRecipe};
///
/// let mut costs = Costs::ticks(4);
/// costs.stages[1] = StageCost::new(2.0, 2.0, 2.0);
/// let recipe = ScheduleRecipe::new(Schedule::Auto, costs.clone(), vec![None; 4])?;
/// let actions = recipe.actions(8, Recompute::Never)?;
/// // The slow stage waits for its first input alone.
/// assert_eq!(simulate(&actions, &costs)?.makespan(), 1.0 + 8.0 * 6.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RecipeParts", into = "RecipeParts")]
pub struct ScheduleRecipe {
    /// Schedule that determines the placement.
    pub(super) schedule: Schedule,
    pub(super) costs: Costs,
    /// Memory of each device in bytes; `None` for no limit.
    pub(super) memory: Vec<Option<u64>>,
}

/// Fields of a recipe, in order.
type RecipeParts = (Schedule, Costs, Vec<Option<u64>>);

impl TryFrom<RecipeParts> for ScheduleRecipe {
    type Error = super::CostError;

    fn try_from((schedule, costs, memory): RecipeParts) -> Result<Self, Self::Error> {
        Self::new(schedule, costs, memory)
    }
}

impl From<ScheduleRecipe> for RecipeParts {
    fn from(recipe: ScheduleRecipe) -> Self {
        (recipe.schedule, recipe.costs, recipe.memory)
    }
}

impl ScheduleRecipe {
    /// Creates a recipe for stages with these costs, placed on the devices as by `schedule`. `memory` has the
    /// bytes of each device; `None` for no limit.
    ///
    /// # Errors
    /// If a cost is invalid, or the costs do not match the schedule's number of stages.
    pub fn new(
        schedule: Schedule,
        costs: Costs,
        memory: Vec<Option<u64>>,
    ) -> Result<Self, super::CostError> {
        costs.check(memory.len().saturating_mul(schedule.stages_per_device()))?;
        Ok(Self { schedule, costs, memory })
    }

    /// Returns a recipe for equal stages, with one tick per action. Each device has memory for as many
    /// activations as there are stages, which zero-bubble schedules need.
    pub(super) fn equal(schedule: Schedule, devices: usize) -> Self {
        let stages = devices * schedule.stages_per_device();
        let mut costs = Costs::ticks(stages);
        costs.stages.iter_mut().for_each(|stage| stage.activation_bytes = 1);
        Self { schedule, costs, memory: vec![Some(stages as u64); devices] }
    }

    /// Returns whether the recipe is for this schedule and this number of devices.
    #[must_use]
    pub fn is_of(&self, schedule: Schedule, devices: usize) -> bool {
        self.schedule == schedule && self.memory.len() == devices
    }

    /// Makes the list of actions of each device, for any number of micro-batches from 1. The simulated step
    /// is never longer than that of any named schedule with the same placement that fits.
    ///
    /// # Errors
    /// As for [`Schedule::actions`].
    pub fn actions(
        &self,
        micro_batches: usize,
        recompute: Recompute,
    ) -> Result<Actions, ScheduleError> {
        self.actions_by_stage(micro_batches, |_| recompute)
    }

    /// Makes the actions with the recomputation of each stage.
    ///
    /// # Errors
    /// As for [`actions`](Self::actions).
    pub fn actions_by_stage(
        &self,
        micro_batches: usize,
        recompute: impl Fn(StageId) -> Recompute,
    ) -> Result<Actions, ScheduleError> {
        let devices = self.memory.len();
        self.schedule.check(devices, micro_batches)?;
        let placement = self.schedule.placement(devices);
        let modes: Vec<_> = (0..placement.len()).map(|j| recompute(StageId::at(j))).collect();
        let work = Work { recipe: self, placement: &placement, micro_batches, recompute: &modes };
        match automatic::best(work) {
            Ok(Some(best)) => Ok(best.actions),
            // Times with an infinite sum cannot be compared.
            _ => self.schedule.alike()[0].actions_by_stage(devices, micro_batches, recompute),
        }
    }
}
