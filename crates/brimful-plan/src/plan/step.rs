//! Simulated step of a row, to be drawn or traced.

use crate::balance::Balance;
use crate::schedule::{
    Actions, CostError, Costs, Simulation, Transfers, simulate, simulate_transfers,
};

use super::stage_costs::StepCosts;
use super::{PlanChoice, PlanError, PlanRow, Request};

/// Step as the planner simulated it.
#[derive(Debug, Clone)]
pub struct PlannedStep {
    /// Actions of the step.
    pub actions: Actions,
    /// Costs of its stages.
    pub costs: Costs,
    /// Transfers between devices and host.
    pub transfers: Transfers,
    /// Simulation of the step.
    pub simulation: Simulation,
}

impl PlannedStep {
    /// Simulates a row of the plan for `request` again, for its timeline.
    ///
    /// # Errors
    /// If the row does not belong to the request.
    pub fn new(request: &Request<'_>, row: &PlanRow) -> Result<Self, PlanError> {
        request.check()?;
        let PlanChoice { schedule, micro_batches, .. } = row.choice;
        let mode = |stage| row.recompute_of(stage);
        let actions = match &row.recipe {
            Some(recipe) => recipe.actions_by_stage(micro_batches, mode)?,
            None => schedule.actions_by_stage(request.devices.len(), micro_batches, mode)?,
        };
        // A row of another request may have another model's balance, which would index past the layers.
        Balance::new(row.balance.sizes(), request.profile.layers.len())?;
        let costs = StepCosts::new(request, micro_batches);
        let costs = if row.at_host() > 0 { costs.with_offload() } else { costs };
        let costs = costs.stages(&row.balance, actions.placement());
        let locations: Vec<_> = row.stages.iter().map(|stage| stage.location()).collect();
        let transfers =
            Transfers::new(&actions, &locations, row.device_buffers).map_err(CostError::from)?;
        let simulation = match transfers.is_empty() {
            true => simulate(&actions, &costs)?,
            false => simulate_transfers(&actions, &transfers, &costs)?,
        };
        Ok(Self { actions, costs, transfers, simulation })
    }
}
