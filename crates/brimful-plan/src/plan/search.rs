//! Searches for the best balance of one choice of schedule, number of micro-batches and recomputation.

use crate::balance::{self, Balance, BalanceError, Load, Slot};
use crate::schedule::{Actions, Costs, DeviceId, Recompute, ScheduleRecipe, StageId, simulate};

use super::stage_costs::StepCosts;
use super::{Misfit, PlanChoice, PlanError, PlanRow, Reason, Refusal, Request, kept};

/// Number of retries of a balance that does not fit, with lower limits.
const TRIES: usize = 4;

/// Returns the best way to run the step with this choice, if it can be built.
pub(super) fn best_row(
    request: &Request<'_>,
    choice: PlanChoice,
) -> Result<Result<PlanRow, Refusal>, PlanError> {
    if let Some(reason) = impossible(request, choice) {
        return Ok(Err(Refusal { choice, reason }));
    }
    match request.recompute {
        Some(_) => BalanceTrial::new(request, choice)?.best().map(Ok),
        None => kept::best_row(request, choice).map(Ok),
    }
}

fn impossible(request: &Request<'_>, choice: PlanChoice) -> Option<Reason> {
    let stages = request.devices.len().saturating_mul(choice.schedule.stages_per_device());
    let layers = request.profile.layers.len();
    if stages > layers {
        return Some(Reason::TooFewLayers(BalanceError::TooFewLayers { stages, layers }));
    }
    let (samples, micro_batches) = (request.samples, choice.micro_batches);
    (micro_batches > samples).then_some(Reason::TooFewSamples { samples, micro_batches })
}

/// Search over the balances of one choice.
pub(super) struct BalanceTrial<'a> {
    pub(super) request: &'a Request<'a>,
    choice: PlanChoice,
    /// Actions of the choice. An automatic schedule is made only for a given balance. Until a balance is chosen,
    /// the leanest named schedule with the same placement replaces the automatic one.
    pub(super) actions: Actions,
    costs: StepCosts<'a>,
    loads: Vec<Load>,
    slots: Vec<Slot>,
}

impl<'a> BalanceTrial<'a> {
    pub(super) fn new(request: &'a Request<'a>, choice: PlanChoice) -> Result<Self, PlanError> {
        let PlanChoice { schedule, micro_batches, recompute } = choice;
        let alike = schedule.alike()[0];
        let actions = alike.actions(request.devices.len(), micro_batches, recompute)?;
        let costs = StepCosts::new(request, micro_batches);
        let loads = costs.loads(recompute);
        // A device's memory is divided equally among its stages: the balancer has limits for stages only, and the
        // stages of one device are similar under every schedule here.
        let parts = schedule.stages_per_device() as u64;
        let slot = |(j, device): (usize, &DeviceId)| {
            let device = request.devices[device.index()];
            let held = actions.held(StageId::at(j)) as u64;
            Slot { speed: device.speed, memory: device.memory.map(|memory| memory / parts), held }
        };
        let slots = actions.placement().iter().enumerate().map(slot).collect();
        Ok(Self { request, choice, actions, costs, loads, slots })
    }

    /// Returns the best row with the same recomputation for every stage: the fastest balance if it fits,
    /// else the fastest that the memory allows, else the one with the smallest excess.
    pub(super) fn best(&self) -> Result<PlanRow, PlanError> {
        let fastest = self.row(self.fastest()?)?;
        if fastest.fits {
            return Ok(fastest);
        }
        // Among rows of equal excess the earlier one wins, which is faster.
        let others = self.within_memory()?.into_iter();
        Ok(others.fold(fastest, |best, row| if row.excess() < best.excess() { row } else { best }))
    }

    /// Returns the balance with the shortest time of the slowest stage, without regard to memory.
    pub(super) fn fastest(&self) -> Result<Balance, PlanError> {
        Ok(balance::by_time(&self.loads, &self.slots)?)
    }

    /// Returns the costs of the stages of a balance.
    pub(super) fn costs(&self, balance: &Balance) -> Costs {
        self.costs.stages(balance, self.actions.placement())
    }

    fn row(&self, balance: Balance) -> Result<PlanRow, PlanError> {
        self.row_by_stage(balance, |_| self.choice.recompute)
    }

    /// Simulates the step with this balance, and the recomputation of each stage.
    pub(super) fn row_by_stage(
        &self,
        balance: Balance,
        mode: impl Fn(StageId) -> Recompute,
    ) -> Result<PlanRow, PlanError> {
        let PlanChoice { schedule, micro_batches, .. } = self.choice;
        let (costs, devices) = (self.costs(&balance), &self.request.devices);
        let memory = devices.iter().map(|device| device.memory).collect();
        let recipe =
            schedule.is_automatic().then(|| ScheduleRecipe::new(schedule, costs.clone(), memory));
        let recipe = recipe.transpose()?;
        let actions = match &recipe {
            Some(recipe) => recipe.actions_by_stage(micro_batches, mode)?,
            None => schedule.actions_by_stage(devices.len(), micro_batches, mode)?,
        };
        let step = simulate(&actions, &costs)?;
        Ok(PlanRow { recipe, ..PlanRow::new(self.choice, balance, &step, devices) })
    }

    /// Returns rows for balances within the memory. The simulation counts boundaries, which the balancer
    /// does not. If a simulated step needs too much memory, the limits are lowered by its excess.
    fn within_memory(&self) -> Result<Vec<PlanRow>, PlanError> {
        let mut rows = vec![self.row(balance::by_bytes(&self.loads, &self.slots)?)?];
        let mut slots = self.slots.clone();
        // A few retries converge, because the boundaries change little from one cut to the next.
        for _ in 0..TRIES {
            let balance = match balance::by_time_within(&self.loads, &slots) {
                Err(BalanceError::DoesNotFit { .. }) => break,
                other => other?,
            };
            let row = self.row(balance)?;
            if row.fits {
                return Ok(vec![row]);
            }
            self.lower(&mut slots, &row);
            rows.push(row);
        }
        Ok(rows)
    }

    fn lower(&self, slots: &mut [Slot], row: &PlanRow) {
        let parts = self.choice.schedule.stages_per_device() as u64;
        for (slot, device) in slots.iter_mut().zip(self.actions.placement()) {
            let misfit = row.misfits.iter().find(|misfit| misfit.device == *device);
            let over = misfit.map_or(0, Misfit::excess).div_ceil(parts);
            slot.memory = slot.memory.map(|memory| memory.saturating_sub(over));
        }
    }
}
