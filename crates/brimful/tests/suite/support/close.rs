//! Equality of tensors, and approximate equality.

use tch::{Device, Kind, Tensor};

/// Tolerance of doubles after sums in another order, relative to the largest of them.
pub const TOLERANCE: f64 = 1e-10;

/// Values smaller than this count as this large: gradients that should be 0 are rounding.
const SMALL: f64 = 1e-3;

/// Checks for equal names, and for values that differ by at most [`TOLERANCE`] of their size.
#[track_caller]
pub fn assert_close(a: &[(String, Tensor)], b: &[(String, Tensor)], what: &str) {
    assert_within(a, b, TOLERANCE, what);
}

/// Checks for values that differ by at most [`TOLERANCE`] of their size.
#[track_caller]
pub fn assert_all_close(a: &Tensor, b: &Tensor, what: &str) {
    assert_all_within(a, b, TOLERANCE, what);
}

/// Checks for values that differ by at most this part of their size.
#[track_caller]
pub fn assert_all_within(a: &Tensor, b: &Tensor, part: f64, what: &str) {
    let named = |tensor: &Tensor| [(String::new(), tensor.shallow_clone())];
    assert_within(&named(a), &named(b), part, what);
}

/// Checks for equal names, and for values that differ by at most this part of their size.
#[track_caller]
pub fn assert_within(a: &[(String, Tensor)], b: &[(String, Tensor)], part: f64, what: &str) {
    assert_near(what, a, b, part, SMALL);
}

/// Checks as [`assert_within`], with values below a hundredth counted as that large.
#[track_caller]
pub fn near(what: &str, found: &[(String, Tensor)], expected: &[(String, Tensor)], part: f64) {
    assert_near(what, found, expected, part, 1e-2);
}

/// Checks for equal names, and for values that differ by at most this part of their size, with values below
/// `small` counted as that large; reports the worst element.
#[track_caller]
pub fn assert_near(
    what: &str,
    found: &[(String, Tensor)],
    expected: &[(String, Tensor)],
    part: f64,
    small: f64,
) {
    assert_eq!(names(found), names(expected), "{what}");
    for ((name, found), (_, expected)) in found.iter().zip(expected) {
        assert_eq!(found.size(), expected.size(), "{what}: {name}");
        if found.numel() == 0 {
            continue;
        }
        let there = |t: &Tensor| t.detach().to_device(Device::Cpu).to_kind(Kind::Double);
        let [found, expected] = [found, expected].map(|t| there(t).reshape([-1]));
        let scale = expected.abs().max().double_value(&[]).max(small);
        let off = (&found - &expected).abs() / scale;
        let at = off.argmax(0, false).int64_value(&[]);
        let [off, found, expected] = [off, found, expected].map(|t| t.double_value(&[at]));
        // Not negated: a NaN must fail.
        assert!(
            off <= part,
            "{what}: element {at} of {name} is {found:e}, not {expected:e}: off by {off:e}"
        );
    }
}

/// Checks for equal names, and for equal values to the last bit.
#[track_caller]
pub fn assert_same(what: &str, before: &[(String, Tensor)], after: &[(String, Tensor)]) {
    assert_eq!(names(before), names(after), "{what}");
    for ((name, before), (_, after)) in before.iter().zip(after) {
        assert_eq!(before, after, "{what}: {name}");
    }
}

fn names(all: &[(String, Tensor)]) -> Vec<&str> {
    all.iter().map(|(name, _)| name.as_str()).collect()
}
