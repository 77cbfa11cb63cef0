//! Chooses for each stage whether it keeps or recomputes its activations, for the shortest step within the
//! devices' memory.
//!
//! For each device, a knapsack picks the stages that save most time by keeping their activations. Its
//! capacity is the memory that is free when no stage keeps them. The peak also depends on when each stage
//! holds its activations, which only the simulation shows. So each simulated step corrects the capacity, by
//! the excess or by the free bytes. In the end, the other stages are tried one by one.

use crate::balance::Balance;
use crate::schedule::{Action, ActionKind, Actions, Recompute, StageId};

use super::knapsack::{self, Offer};
use super::search::BalanceTrial;
use super::{PlanChoice, PlanError, PlanRow, PlannedStage, Request};

/// Number of corrections of the knapsack's capacity; a few are enough, because each corrects the whole
/// difference.
const TRIES: usize = 4;

/// Mode of a stage that keeps nothing: as lean as always recomputing, and faster.
const LEAN: Recompute = Recompute::ExceptLast;

/// Index of each way in a stage's offers.
const KEEPS: usize = 0;
const COMPUTES_AGAIN: usize = 1;

/// Returns the best way to run the step: all activations kept if that fits, else as many as fit, else the
/// row with the smallest excess.
pub(super) fn best_row(request: &Request<'_>, choice: PlanChoice) -> Result<PlanRow, PlanError> {
    let keeping = PlanChoice { recompute: Recompute::Never, ..choice };
    let keeping = BalanceTrial::new(request, keeping)?;
    let (fastest, all) = (keeping.fastest()?, keeping.best()?);
    // If the fastest balance does not fit with all activations kept, recomputing some of them with that balance
    // can be faster than another balance that keeps them all.
    if all.fits && all.balance == fastest {
        return Ok(all);
    }
    let trial = BalanceTrial::new(request, PlanChoice { recompute: LEAN, ..choice })?;
    let lean = trial.best()?;
    let mut balances = vec![lean.balance.clone(), all.balance.clone(), fastest];
    balances.dedup();
    let is_better = |row: &PlanRow, best: &PlanRow| {
        let (over, least) = (row.excess(), best.excess());
        over < least || over == least && row.makespan <= best.makespan
    };
    let mut best = if is_better(&lean, &all) { lean } else { all };
    for balance in balances {
        let mixed = KeptStages::new(&trial, &keeping.actions, balance).best()?;
        if let Some(mixed) = mixed.filter(|mixed| mixed.fits && is_better(mixed, &best)) {
            best = mixed;
        }
    }
    Ok(best)
}

/// Stages of one balance, some of which keep their activations.
struct KeptStages<'a> {
    /// Trial in which every stage recomputes its activations.
    trial: &'a BalanceTrial<'a>,
    balance: Balance,
    /// Costs of each stage with activations kept, and with recomputation.
    offers: Vec<[Offer; 2]>,
}

impl<'a> KeptStages<'a> {
    /// Estimates the offers; `kept` has the actions of the same choice with all activations kept.
    fn new(trial: &'a BalanceTrial<'a>, kept: &Actions, balance: Balance) -> Self {
        let costs = trial.costs(&balance);
        let offers = (0..costs.stages.len()).map(|j| {
            let (stage, cost) = (StageId::at(j), &costs.stages[j]);
            let again =
                |action: &&Action| action.kind == ActionKind::Recompute && action.stage == stage;
            let runs = trial.actions.lists().iter().flatten().filter(again).count();
            // One micro-batch's activations are in memory during its backward in any case.
            let more = kept.held(stage).saturating_sub(1) as u64;
            let bytes = more.saturating_mul(cost.activation_bytes);
            let seconds = runs as f64 * cost.recompute;
            let keeps = Offer { way: KEEPS, bytes, seconds: 0.0 };
            [keeps, Offer { way: COMPUTES_AGAIN, bytes: 0, seconds }]
        });
        Self { trial, balance, offers: offers.collect() }
    }

    /// Returns the shortest step that fits; `None` if not even the step that keeps nothing fits.
    fn best(&self) -> Result<Option<PlanRow>, PlanError> {
        let mut best = self.row(&vec![false; self.offers.len()])?;
        if !best.fits {
            return Ok(None);
        }
        let mut free = self.left(&best);
        for _ in 0..TRIES {
            let keeps = self.picked(&free);
            let row = self.row(&keeps)?;
            let left = self.left(&row);
            free.iter_mut().zip(&left).for_each(|(free, left)| *free += left);
            if row.fits && row.makespan < best.makespan {
                best = row;
            }
            if left.iter().all(|left| *left == 0) {
                break;
            }
        }
        self.one_by_one(best).map(Some)
    }

    /// Lets further stages keep their activations if these fit, beginning with the longest recompute. Leaves
    /// automatic schedules unchanged, because each try would need a search for a new schedule.
    fn one_by_one(&self, mut best: PlanRow) -> Result<PlanRow, PlanError> {
        if best.choice.schedule.is_automatic() {
            return Ok(best);
        }
        let seconds = |j: &usize| self.offers[*j][COMPUTES_AGAIN].seconds;
        let mut order: Vec<_> = (0..self.offers.len()).filter(|j| seconds(j) > 0.0).collect();
        order.sort_by(|a, b| seconds(b).total_cmp(&seconds(a)));
        for j in order {
            let is_kept = |stage: &PlannedStage| stage.recompute == Recompute::Never;
            let mut keeps: Vec<_> = best.stages.iter().map(is_kept).collect();
            if std::mem::replace(&mut keeps[j], true) {
                continue;
            }
            let row = self.row(&keeps)?;
            if row.fits && row.makespan <= best.makespan {
                best = row;
            }
        }
        Ok(best)
    }

    fn row(&self, keeps: &[bool]) -> Result<PlanRow, PlanError> {
        let mode = |keeps: &bool| if *keeps { Recompute::Never } else { LEAN };
        let modes: Vec<_> = keeps.iter().map(mode).collect();
        let row = self.trial.row_by_stage(self.balance.clone(), |stage| modes[stage.index()])?;
        Ok(PlanRow { stages: modes.into_iter().map(PlannedStage::resident).collect(), ..row })
    }

    /// Picks the stages that keep their activations, by a knapsack for each device.
    fn picked(&self, free: &[i128]) -> Vec<bool> {
        let capacities = free.iter().map(|free| u64::try_from((*free).max(0)).unwrap_or(u64::MAX));
        let offers = |j: usize| self.offers[j].to_vec();
        let ways = knapsack::pick_all(self.trial.actions.placement(), capacities, offers);
        let ways = ways.expect("computing again takes no room");
        ways.into_iter().map(|way| way == KEEPS).collect()
    }

    /// Returns the free bytes of each device, negative if the step exceeds its memory. For a device without
    /// a limit, returns the bytes of all activations that can be kept.
    fn left(&self, row: &PlanRow) -> Vec<i128> {
        let all = self.offers.iter().map(|[keeps, _]| i128::from(keeps.bytes)).sum::<i128>();
        let left = |(device, peak): (&super::PlanDevice, &u64)| {
            device.memory.map_or(all, |memory| i128::from(memory) - i128::from(*peak))
        };
        self.trial.request.devices.iter().zip(&row.peak_bytes).map(left).collect()
    }
}
