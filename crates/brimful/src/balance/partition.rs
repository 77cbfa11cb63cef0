//! The exact min-max partition of layers in a row over stages in a row.
//!
//! 1. Bisect the bound: it is feasible if some cut keeps every stage at it or below.
//! 2. At the smallest bound, find the feasible cut that sends the fewest bytes (`transfer`).
//!
//! Whether a bound is feasible is mostly seen at once: every stage takes all that it may, and the
//! layers are used up or not. Only where a layer fits some stages and not others can that fail
//! though a cut exists, and then the search of step 2 decides.

use super::problem::Problem;
use super::{Balance, BalanceError, transfer};

/// Sums of times in different orders differ in their last digits; costs so near are equal.
const EQUAL: f64 = 1e-9;

pub(super) fn solve(problem: &Problem<'_>) -> Result<Balance, BalanceError> {
    let bound = smallest_bound(problem).ok_or_else(|| problem.does_not_fit())?;
    let bound = bound * (1.0 + EQUAL);
    let ends = transfer::least(problem, bound).ok_or_else(|| problem.does_not_fit())?;
    Ok(Balance::from_ends(&ends))
}

/// The cost of the best cut's worst stage, or `None` if nothing fits.
fn smallest_bound(problem: &Problem<'_>) -> Option<f64> {
    let mut feasible = worst(problem, &any_cut(problem, f64::INFINITY)?);
    let mut infeasible = 0.0;
    while feasible - infeasible > feasible * EQUAL / 1e3 {
        let bound = f64::midpoint(infeasible, feasible);
        if bound <= infeasible || bound >= feasible {
            break; // no number lies between them
        }
        match any_cut(problem, bound) {
            // A cut is worth its own cost, which is often below the bound that was tried.
            Some(ends) => feasible = worst(problem, &ends),
            None => infeasible = bound,
        }
    }
    Some(feasible)
}

fn worst(problem: &Problem<'_>, ends: &[usize]) -> f64 {
    let stages = starts(ends).zip(ends).enumerate();
    stages.map(|(j, (start, end))| problem.cost(j, *start, *end)).fold(0.0, f64::max)
}

/// Where the stages begin that end at `ends`.
fn starts(ends: &[usize]) -> impl Iterator<Item = &usize> {
    std::iter::once(&0).chain(ends)
}

/// A cut, as the end of each stage, that keeps every stage at `bound` or below.
fn any_cut(problem: &Problem<'_>, bound: f64) -> Option<Vec<usize>> {
    let latest = latest_ends(problem, bound);
    let all_used = latest.last() == Some(&problem.layers());
    if all_used && starts(&latest).zip(&latest).all(|(start, end)| start < end) {
        return Some(latest);
    }
    transfer::least(problem, bound)
}

/// The layer beyond which each stage cannot end: all take what they may, but leave one for each
/// stage after them.
pub(super) fn latest_ends(problem: &Problem<'_>, bound: f64) -> Vec<usize> {
    let (s, n) = (problem.stages(), problem.layers());
    let mut start = 0;
    let end = |j| {
        let ends = start + 1..n + 1 - (s - 1 - j);
        start += count_while(ends.len(), |k| problem.allows(j, start, ends.start + k, bound));
        start
    };
    (0..s).map(end).collect()
}

/// The layer before which each stage cannot end: the same, seen from the right.
pub(super) fn earliest_ends(problem: &Problem<'_>, bound: f64) -> Vec<usize> {
    let mut ends = vec![problem.layers(); problem.stages()];
    for j in (1..ends.len()).rev() {
        let end = ends[j];
        let taken =
            count_while(end.saturating_sub(j), |k| problem.allows(j, end - 1 - k, end, bound));
        ends[j - 1] = end - taken;
    }
    ends
}

/// How many of 0, 1, 2, … below `count` pass, if those that pass come first.
fn count_while(count: usize, passes: impl Fn(usize) -> bool) -> usize {
    let (mut passed, mut failed) = (0, count);
    while passed < failed {
        let middle = passed.midpoint(failed);
        if passes(middle) {
            passed = middle + 1;
        } else {
            failed = middle;
        }
    }
    passed
}
