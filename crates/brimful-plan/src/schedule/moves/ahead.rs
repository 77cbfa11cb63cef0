//! A step whose updates at home were computed ahead of it, during the backward of the step before.

use super::super::{Actions, CostError, Costs, MoveSpan, Simulation};
use super::{MoveKind, Moves, simulate_moves};

/// The stage that a step begins with: its update is wanted at once, so there is nothing to hide it behind.
const FIRST: usize = 0;

/// As [`simulate_moves`], in a run whose host looks ahead: when a stage's gradients are home, it computes what their
/// update will come to. What is done by the end of the step is taken over; the rest, as the first stage's, is computed
/// behind the next step's forward.
///
/// # Errors
/// As [`simulate_moves`].
pub fn simulate_moves_ahead(
    actions: &Actions,
    moves: &Moves,
    costs: &Costs,
) -> Result<Simulation, CostError> {
    costs.check(actions.stages())?;
    let mut left = costs.clone();
    left.stages.iter_mut().skip(FIRST + 1).for_each(|stage| stage.home_update = 0.0);
    let step = simulate_moves(actions, moves, &left)?;
    let late = late_updates(&step, costs);
    if late.is_empty() {
        return Ok(step);
    }
    // Updates make the forward wait; when gradients are home is counted from the end, so it stays.
    late.into_iter().for_each(|j| left.stages[j].home_update = costs.stages[j].home_update);
    simulate_moves(actions, moves, &left)
}

/// The stages but the first whose updates are not computed by the end of the step, one after the other.
fn late_updates(step: &Simulation, costs: &Costs) -> Vec<usize> {
    let looks_ahead = |span: &&MoveSpan| {
        span.moved.kind == MoveKind::GradientsHome && span.moved.stage.index() != FIRST
    };
    let moved = step.buses().iter().flat_map(|bus| &bus.moves);
    let mut home: Vec<_> = moved.filter(looks_ahead).collect();
    home.sort_by(|a, b| a.end.total_cmp(&b.end));
    let mut done = 0.0;
    let late = home.into_iter().filter_map(|span| {
        let j = span.moved.stage.index();
        done = f64::max(done, span.end) + costs.stages[j].home_update;
        (done > step.makespan()).then_some(j)
    });
    late.collect()
}
