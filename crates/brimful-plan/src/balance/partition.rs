//! Solves the exact min-max partition of a row of layers over a row of stages.
//!
//! 1. Bisect the bound. A bound is feasible if some cut keeps the cost of every stage at or below it.
//! 2. At the smallest bound, find the feasible cut that sends the fewest bytes (`transfer`).
//!
//! A greedy cut decides feasibility in most cases: every stage takes as many layers as allowed, and the bound is
//! feasible if all layers are used up. The greedy cut misses a feasible cut only if a layer fits some stages and
//! not others. So when the greedy cut fails, the search of step 2 decides.

use super::bands::latest_ends;
use super::problem::PartitionProblem;
use super::{Balance, BalanceError, transfer};

/// Relative difference below which costs are equal: sums of times in different orders differ in their last
/// digits.
const EQUAL: f64 = 1e-9;

pub(super) fn solve(problem: &PartitionProblem<'_>) -> Result<Balance, BalanceError> {
    let bound = smallest_bound(problem).ok_or_else(|| problem.does_not_fit())?;
    // Admit cuts whose worst stage is worse by rounding alone: one of them may send fewer bytes.
    let bound = bound * (1.0 + EQUAL);
    let ends = transfer::least(problem, bound).ok_or_else(|| problem.does_not_fit())?;
    Ok(Balance::from_ends(&ends))
}

/// Returns the cost of the best cut's worst stage, or `None` if nothing fits.
fn smallest_bound(problem: &PartitionProblem<'_>) -> Option<f64> {
    let mut feasible = worst(problem, &any_cut(problem, f64::INFINITY)?);
    let mut infeasible = 0.0;
    // A thousandth of the tolerance, so that the bisection's own error does not matter.
    while feasible - infeasible > feasible * EQUAL / 1e3 {
        let bound = f64::midpoint(infeasible, feasible);
        if bound <= infeasible || bound >= feasible {
            break; // no number lies between them
        }
        match any_cut(problem, bound) {
            // The cut's own cost is often below the bound that was tested.
            Some(ends) => feasible = worst(problem, &ends),
            None => infeasible = bound,
        }
    }
    Some(feasible)
}

fn worst(problem: &PartitionProblem<'_>, ends: &[usize]) -> f64 {
    let stages = starts(ends).zip(ends).enumerate();
    stages.map(|(j, (start, end))| problem.cost(j, *start, *end)).fold(0.0, f64::max)
}

/// Returns the starts of the stages that end at `ends`.
fn starts(ends: &[usize]) -> impl Iterator<Item = &usize> {
    std::iter::once(&0).chain(ends)
}

/// Returns a cut, as the end of each stage, that keeps every stage at or below `bound`.
fn any_cut(problem: &PartitionProblem<'_>, bound: f64) -> Option<Vec<usize>> {
    let latest = latest_ends(problem, bound);
    // The greedy cut takes one binary search for each stage. It is valid if it uses all layers and leaves no stage
    // empty, which is nearly always the case.
    let all_used = latest.last() == Some(&problem.layers());
    if all_used && starts(&latest).zip(&latest).all(|(start, end)| start < end) {
        return Some(latest);
    }
    transfer::least(problem, bound)
}
