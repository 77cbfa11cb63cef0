//! Checks of options that are numbers.

use super::OptimError;
use crate::Result;

pub(crate) fn check_rate(rate: f64) -> Result<()> {
    at_least_zero("learning rate", rate)
}

pub(super) fn at_least_zero(option: &'static str, value: f64) -> Result<()> {
    let remedy = "give a finite number of at least 0";
    within(option, value, value >= 0.0 && value.is_finite(), remedy)
}

/// Refuses the value unless it is `good`.
pub(super) fn within(
    option: &'static str,
    value: f64,
    good: bool,
    remedy: &'static str,
) -> Result<()> {
    if good {
        Ok(())
    } else {
        Err(OptimError::BadOption { option, value: value.to_string(), remedy }.into())
    }
}
