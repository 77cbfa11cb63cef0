//! Difference between the gradients of two contestants.

use anyhow::{Result, ensure};
use brimful_cli::setting::NumberType;
use tch::{Kind, Tensor};

/// Returns the norm of the difference of all gradients, divided by the norm of the expected ones. Fails if it
/// exceeds the dtype's rounding errors: contestants that compute different things are not worth comparing.
pub(crate) fn relative_difference(
    expected: &[Tensor],
    found: &[Tensor],
    dtype: NumberType,
) -> Result<f64> {
    ensure!(
        expected.len() == found.len(),
        "the contestants have {} and {} gradients",
        expected.len(),
        found.len()
    );
    let square = |gradient: &Tensor| {
        let long = gradient.to_kind(Kind::Double);
        (&long * &long).sum(Kind::Double).double_value(&[])
    };
    let apart: f64 = expected.iter().zip(found).map(|(a, b)| square(&(a - b))).sum();
    let all: f64 = expected.iter().map(square).sum();
    let difference = (apart / all).sqrt();
    let tolerance = match dtype {
        NumberType::F64 => 1e-10,
        NumberType::F32 => 1e-4,
        NumberType::Tf32 | NumberType::Bf16 => 0.02,
    };
    ensure!(
        difference <= tolerance,
        "the contestants' gradients differ by {difference:.1e} of their length, more than the {tolerance:.0e} \
         that {dtype} explains"
    );
    Ok(difference)
}
