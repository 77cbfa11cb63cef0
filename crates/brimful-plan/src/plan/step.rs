//! A row of the answer with its timeline, to be drawn or traced.

use crate::balance::Balance;
use crate::schedule::{Actions, Costs, Simulation, simulate};

use super::stage_costs::StepCosts;
use super::{PlanChoice, PlanError, PlanRow, Request};

/// A step as the planner simulated it.
#[derive(Debug, Clone)]
pub struct PlannedStep {
    /// What is run.
    pub actions: Actions,
    /// What it costs.
    pub costs: Costs,
    /// When it runs.
    pub simulation: Simulation,
}

impl PlannedStep {
    /// Simulates a row of the answer to `request` again, for its timeline.
    ///
    /// # Errors
    /// Where the row is not an answer to the request.
    pub fn new(request: &Request<'_>, row: &PlanRow) -> Result<Self, PlanError> {
        request.check()?;
        let PlanChoice { schedule, micro_batches, recompute } = row.choice;
        let actions = schedule.actions(request.devices.len(), micro_batches, recompute)?;
        // A row of another request may have another model's balance, which would index past the layers.
        Balance::new(row.balance.sizes(), request.profile.layers.len())?;
        let costs = StepCosts::new(request, micro_batches).stages(&row.balance, &actions);
        let simulation = simulate(&actions, &costs)?;
        Ok(Self { actions, costs, simulation })
    }
}
