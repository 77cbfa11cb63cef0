//! Comparison of a replay with an eager run, up to rounding.

use brimful_torch::foreach;
use tch::{Device, Kind, Tensor};

use super::readout::Readout;
use crate::Result;
use crate::accumulate::Sum;

/// Result of a comparison.
#[derive(Debug)]
pub(super) enum Verdict {
    Alike,
    /// Description of the difference.
    Differs(String),
    /// The eager run was not finite.
    Unknown,
}

/// Compares losses and gradients of a model of this dtype. Overwrites the replayed gradients.
pub(super) fn verdict(
    kind: Kind,
    eager: &[Sum],
    eager_loss: &Readout,
    replayed: &[Sum],
    replayed_loss: &Readout,
) -> Result<Verdict> {
    let tolerance = tolerance(kind);
    let (sizes, errors) = compared(eager, replayed)?;
    let expected = numbers(&eager_loss.row)?;
    let got = numbers(&replayed_loss.row)?;

    if !expected.iter().chain(&sizes).all(|number| number.is_finite()) {
        return Ok(Verdict::Unknown);
    }
    let near = |a: f64, b: f64| (a - b).abs() <= tolerance * a.abs().max(f64::MIN_POSITIVE);
    if let Some((a, b)) = expected.iter().zip(&got).find(|(a, b)| !near(**a, **b)) {
        return Ok(Verdict::Differs(format!("a replay gives a loss of {b}, not {a}")));
    }
    // Errors are relative to the norm of all gradients, because a single bias's gradient may be rounding errors
    // alone.
    let all = sizes.iter().map(|size| size * size).sum::<f64>().sqrt();
    Ok(match errors.iter().find(|error| error.is_nan() || **error > tolerance * all) {
        Some(error) => Verdict::Differs(format!(
            "a replay gives another gradient: a parameter's is off by {error:.3e} of {all:.3e}"
        )),
        None => Verdict::Alike,
    })
}

/// Returns the norms of the eager gradients, and those of their differences from the replayed ones, which are
/// overwritten.
fn compared(eager: &[Sum], replayed: &[Sum]) -> Result<(Vec<f64>, Vec<f64>)> {
    let share = |gradient: &Option<Tensor>| gradient.as_ref().map(Tensor::shallow_clone);
    let mut errors = Vec::new();
    let mut sizes = Vec::new();
    let mut into = Vec::new();
    let mut what = Vec::new();
    let places = |sums: &[Sum]| sums.iter().map(Vec::len).max().unwrap_or(0);
    let places = places(eager).max(places(replayed));
    for group in 0..eager.len().max(replayed.len()) {
        for at in 0..places {
            let [eager, replayed] = [eager, replayed].map(|sums| share(sums.get(group)?.get(at)?));
            sizes.extend(share(&eager));
            match (eager, replayed) {
                (Some(eager), Some(replayed)) => {
                    errors.push(replayed.shallow_clone());
                    into.push(replayed);
                    what.push(eager);
                }
                // A gradient on one side only must be zero.
                (one, other) => errors.extend(one.or(other)),
            }
        }
    }
    foreach::add(&into, &what, -1.0)?;
    Ok((norms(&sizes)?, norms(&errors)?))
}

/// Describes the first operation that differs, in kind or in numbers.
pub(super) fn another(captured: &[String], now: &[String]) -> Option<String> {
    let ended = "nothing".to_owned();
    let all = captured.len().max(now.len());
    let at = (0..all).find(|&at| captured.get(at) != now.get(at))?;
    let [then, now] = [captured, now].map(|lines| lines.get(at).unwrap_or(&ended));
    Some(format!("it runs `{now}` where it ran `{then}`"))
}

/// Returns the tolerance of a comparison. Kernels may sum in another order each time, which changes the rounding.
fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-9,
        Kind::Float => 1e-3,
        _ => 3e-2,
    }
}

fn norms(tensors: &[Tensor]) -> Result<Vec<f64>> {
    let norm = |t: &Tensor| Ok(t.f_norm()?.f_view([1_i64])?.f_to_kind(Kind::Double)?);
    let all = tensors.iter().map(norm).collect::<Result<Vec<_>>>()?;
    if all.is_empty() { Ok(Vec::new()) } else { numbers(&Tensor::f_cat(&all, 0)?) }
}

fn numbers(row: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::try_from(row.f_to_device(Device::Cpu)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_of_both_has_not_reached_must_be_nothing_in_the_other() {
        let number = |value: f64| Some(Tensor::from_slice(&[value]));
        let compared = |eager: Sum, replayed: Sum| compared(&[eager], &[replayed]).expect("norms");
        let both = compared(vec![number(3.0), None], vec![number(3.0), number(0.0)]);
        assert_eq!(both, (vec![3.0], vec![0.0, 0.0]));
        let not_replayed = compared(vec![number(3.0), number(2.0)], vec![number(3.0), None]);
        assert_eq!(not_replayed, (vec![3.0, 2.0], vec![0.0, 2.0]));
        // A leaf that was no parameter at the capture has no index there.
        let other_leaf = compared(vec![number(3.0), number(2.0)], vec![number(3.0)]);
        assert_eq!(other_leaf, not_replayed);
    }
}
