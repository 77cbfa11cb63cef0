//! Binary search for the first number that fails a condition.

/// Counts the numbers 0, 1, 2, … below `count` that pass. Every number that passes must come before the
/// first one that fails.
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
