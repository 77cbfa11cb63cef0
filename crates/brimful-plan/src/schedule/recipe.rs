//! What lists are made from where stages are unlike each other: their costs, and the devices' memory.

use super::automatic::{self, Work};
use super::{Actions, Costs, DeviceId, Recompute, ScheduleError, StageId};

/// What [`Schedule::Auto`](super::Schedule::Auto) goes by: what a micro-batch costs on each stage, one
/// stage on each device, and how much memory each device has. Lists are made from it for any number of
/// micro-batches.
///
/// ```
/// # use brimful_plan as brimful;
/// use brimful::schedule::{Costs, Recompute, ScheduleRecipe, StageCost, simulate};
///
/// let mut costs = Costs::ticks(4);
/// costs.stages[1] = StageCost::new(2.0, 2.0, 2.0);
/// let recipe = ScheduleRecipe::new(costs.clone(), vec![None; 4])?;
/// let actions = recipe.actions(8, Recompute::Never)?;
/// // The slow stage waits for its first input alone.
/// assert_eq!(simulate(&actions, &costs)?.makespan(), 1.0 + 8.0 * 6.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleRecipe {
    costs: Costs,
    memory: Vec<Option<u64>>,
}

impl ScheduleRecipe {
    /// Of stages with these costs, each on a device that has so many bytes; `None` is no limit.
    ///
    /// # Errors
    /// Where a cost is none, or there are more or fewer devices than stages.
    pub fn new(costs: Costs, memory: Vec<Option<u64>>) -> Result<Self, super::CostError> {
        costs.check(memory.len())?;
        Ok(Self { costs, memory })
    }

    /// Of so many equal stages, an action a tick, on devices that have room for as many micro-batches:
    /// what zero-bubble H1 needs.
    pub(super) fn equal(stages: usize) -> Self {
        let mut costs = Costs::ticks(stages);
        costs.stages.iter_mut().for_each(|stage| stage.activation_bytes = 1);
        Self { costs, memory: vec![Some(stages as u64); stages] }
    }

    /// What a micro-batch costs on each stage.
    #[must_use]
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// How many bytes each device has; `None` is no limit.
    #[must_use]
    pub fn memory(&self) -> &[Option<u64>] {
        &self.memory
    }

    /// The list of actions of each device, for any number of micro-batches from 1: never longer, by
    /// simulation, than the shortest named schedule that fits.
    ///
    /// # Errors
    /// As [`Schedule::actions`](super::Schedule::actions).
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
        let stages = self.memory.len();
        let auto = super::Schedule::Auto;
        auto.check(stages, micro_batches)?;
        let placement: Vec<_> = (0..stages).map(DeviceId::at).collect();
        let modes: Vec<_> = (0..stages).map(|j| recompute(StageId::at(j))).collect();
        let work = Work {
            costs: &self.costs,
            placement: &placement,
            memory: &self.memory,
            micro_batches,
            recompute: &modes,
        };
        match automatic::best(work) {
            Ok(Some(best)) => Ok(best.actions),
            // Times whose sum is no number are nothing to go by.
            _ => super::Schedule::OneFOneB.actions_by_stage(stages, micro_batches, recompute),
        }
    }
}
