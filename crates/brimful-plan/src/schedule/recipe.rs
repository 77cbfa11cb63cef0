//! What lists are made from where stages are unlike each other: their costs, and the devices' memory.

use serde::{Deserialize, Serialize};

use super::automatic::{self, Work};
use super::{Actions, Costs, Recompute, Schedule, ScheduleError, StageId};

/// What [`Schedule::Auto`] goes by: what a micro-batch costs on each stage, where the stages are, and how
/// much memory each device has. Lists are made from it for any number of micro-batches.
///
/// ```
/// # use brimful_plan as brimful;
/// use brimful::schedule::{Costs, Recompute, Schedule, ScheduleRecipe, StageCost, simulate};
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
    /// It says where the stages are.
    pub(super) schedule: Schedule,
    pub(super) costs: Costs,
    /// How many bytes each device has; `None` is no limit.
    pub(super) memory: Vec<Option<u64>>,
}

/// What it is made of, in its order.
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
    /// Of stages with these costs, placed as by this schedule on devices that have so many bytes; `None` is
    /// no limit.
    ///
    /// # Errors
    /// Where a cost is none, or the schedule has more or fewer stages on so many devices.
    pub fn new(
        schedule: Schedule,
        costs: Costs,
        memory: Vec<Option<u64>>,
    ) -> Result<Self, super::CostError> {
        costs.check(memory.len().saturating_mul(schedule.stages_per_device()))?;
        Ok(Self { schedule, costs, memory })
    }

    /// Of equal stages, an action a tick, on devices that have room for as many activations as there are
    /// stages: what zero-bubble schedules need.
    pub(super) fn equal(schedule: Schedule, devices: usize) -> Self {
        let stages = devices * schedule.stages_per_device();
        let mut costs = Costs::ticks(stages);
        costs.stages.iter_mut().for_each(|stage| stage.activation_bytes = 1);
        Self { schedule, costs, memory: vec![Some(stages as u64); devices] }
    }

    /// Whether its lists are those of this schedule on so many devices.
    #[must_use]
    pub fn is_of(&self, schedule: Schedule, devices: usize) -> bool {
        self.schedule == schedule && self.memory.len() == devices
    }

    /// The list of actions of each device, for any number of micro-batches from 1: never longer, by
    /// simulation, than the shortest named schedule of the same placement that fits.
    ///
    /// # Errors
    /// As [`Schedule::actions`].
    pub fn actions(
        &self,
        micro_batches: usize,
        recompute: Recompute,
    ) -> Result<Actions, ScheduleError> {
        self.actions_by_stage(micro_batches, |_| recompute)
    }

    /// The same, with what is recomputed said for each stage.
    ///
    /// # Errors
    /// As [`actions`](Self::actions).
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
            // Times whose sum is no number are nothing to go by.
            _ => self.schedule.alike()[0].actions_by_stage(devices, micro_batches, recompute),
        }
    }
}
