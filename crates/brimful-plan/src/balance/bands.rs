//! Range of the possible ends of each stage, under a bound.

use std::ops::RangeInclusive;

use super::problem::PartitionProblem;
use crate::bisect::count_while;

/// Returns the range of layers at which each stage can end; `None` if a stage cannot end at all.
pub(super) fn bands(
    problem: &PartitionProblem<'_>,
    bound: f64,
) -> Option<Vec<RangeInclusive<usize>>> {
    let earliest = earliest_ends(problem, bound).into_iter().enumerate();
    let bands = earliest.zip(latest_ends(problem, bound)).map(|((j, first), last)| {
        // Each of the j earlier stages has at least one layer, so this stage cannot end before layer j + 1.
        let first = first.max(j + 1);
        (first <= last).then_some(first..=last)
    });
    bands.collect()
}

/// Returns the last possible end of each stage: every stage takes as many layers as the bound allows, but leaves
/// one for each later stage.
pub(super) fn latest_ends(problem: &PartitionProblem<'_>, bound: f64) -> Vec<usize> {
    let mut latest = Vec::with_capacity(problem.stages());
    let mut start = 0;
    for j in 0..problem.stages() {
        let stages_after = problem.stages() - 1 - j;
        let most = (problem.layers() - stages_after).saturating_sub(start);
        // A longer run costs more ([Note: monotone]), so its length can be bisected.
        start += count_while(most, |k| problem.allows(j, start, start + 1 + k, bound));
        latest.push(start);
    }
    latest
}

/// Returns the first possible end of each stage, by taking layers from the right.
fn earliest_ends(problem: &PartitionProblem<'_>, bound: f64) -> Vec<usize> {
    let mut ends = vec![problem.layers(); problem.stages()];
    for j in (1..ends.len()).rev() {
        let end = ends[j];
        let taken =
            count_while(end.saturating_sub(j), |k| problem.allows(j, end - 1 - k, end, bound));
        ends[j - 1] = end - taken;
    }
    ends
}
