//! Simulates steps whose updates on the host were computed early, during the backward of the step before.

use super::super::{Actions, CostError, Costs, Simulation, TransferSpan};
use super::{TransferKind, Transfers, simulate_transfers};

/// First stage of a step: its update is needed at once, so nothing can hide it.
const FIRST: usize = 0;

/// Simulates as [`simulate_transfers`] does, with a host that computes updates early: when a stage's gradients
/// are on the host, it computes their update. Updates that are ready at the end of the step are taken over;
/// the rest, and the first stage's, overlap with the next step's forward.
///
/// # Errors
/// As for [`simulate_transfers`].
pub fn simulate_transfers_ahead(
    actions: &Actions,
    transfers: &Transfers,
    costs: &Costs,
) -> Result<Simulation, CostError> {
    costs.check(actions.stages())?;
    let mut left = costs.clone();
    left.stages.iter_mut().skip(FIRST + 1).for_each(|stage| stage.host_update = 0.0);
    let step = simulate_transfers(actions, transfers, &left)?;
    let late = late_updates(&step, costs);
    if late.is_empty() {
        return Ok(step);
    }
    // Updates delay the forward; late updates are determined by the times from the end, which stay the
    // same.
    late.into_iter().for_each(|j| left.stages[j].host_update = costs.stages[j].host_update);
    simulate_transfers(actions, transfers, &left)
}

/// Returns the stages after the first whose updates are not ready at the end of the step, in order.
fn late_updates(step: &Simulation, costs: &Costs) -> Vec<usize> {
    let looks_ahead = |span: &&TransferSpan| {
        span.transfer.kind == TransferKind::OffloadGradients && span.transfer.stage.index() != FIRST
    };
    let transfer = step.host_links().iter().flat_map(|host_link| &host_link.transfers);
    let mut on_host: Vec<_> = transfer.filter(looks_ahead).collect();
    on_host.sort_by(|a, b| a.end.total_cmp(&b.end));
    let mut done = 0.0;
    let late = on_host.into_iter().filter_map(|span| {
        let j = span.transfer.stage.index();
        done = f64::max(done, span.end) + costs.stages[j].host_update;
        (done > step.makespan()).then_some(j)
    });
    late.collect()
}
