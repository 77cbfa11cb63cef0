//! Binary search for the end of a run.

/// Counts the numbers 0, 1, 2, … below `count` that pass, if those that pass come first.
pub(crate) fn count_while(count: usize, passes: impl Fn(usize) -> bool) -> usize {
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
