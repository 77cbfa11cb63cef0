//! Whether a replay gives what an eager run gave, up to rounding.

use brimful_torch::foreach;
use tch::{Device, Kind, Tensor};

use super::readout::Readout;
use crate::Result;
use crate::accumulate::Sum;

/// What a comparison came to.
#[derive(Debug)]
pub(super) enum Verdict {
    Alike,
    /// In what.
    Differs(String),
    /// The eager run gave no finite numbers.
    Unknown,
}

/// Compares losses and gradients of a model whose numbers are of this kind. The replayed gradients
/// are used up.
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
    // Against the norm of all gradients: that of a single bias may be rounding errors alone.
    let all = sizes.iter().map(|size| size * size).sum::<f64>().sqrt();
    Ok(match errors.iter().find(|error| error.is_nan() || **error > tolerance * all) {
        Some(error) => Verdict::Differs(format!(
            "a replay gives another gradient: a parameter's is off by {error:.3e} of {all:.3e}"
        )),
        None => Verdict::Alike,
    })
}

/// The norms of the eager gradients, and those of what replayed ones differ by. The replayed ones are
/// used up.
fn compared(eager: &[Sum], replayed: &[Sum]) -> Result<(Vec<f64>, Vec<f64>)> {
    let share = |gradient: &Option<Tensor>| gradient.as_ref().map(Tensor::shallow_clone);
    // What an eager run did not reach must come to nothing in a replay too.
    let mut errors = Vec::new();
    let mut into = Vec::new();
    let mut what = Vec::new();
    for (replayed, eager) in replayed.iter().flatten().zip(eager.iter().flatten()) {
        errors.extend(share(replayed));
        if let (Some(replayed), Some(eager)) = (share(replayed), share(eager)) {
            into.push(replayed);
            what.push(eager);
        }
    }
    foreach::add(&into, &what, -1.0)?;
    Ok((norms(&what)?, norms(&errors)?))
}

/// The first operation that is another one, or has other numbers, in words.
pub(super) fn another(captured: &[String], now: &[String]) -> Option<String> {
    let ended = "nothing".to_owned();
    let all = captured.len().max(now.len());
    let at = (0..all).find(|&at| captured.get(at) != now.get(at))?;
    let [then, now] = [captured, now].map(|lines| lines.get(at).unwrap_or(&ended));
    Some(format!("it runs `{now}` where it ran `{then}`"))
}

/// What kernels may differ by that add in another order each time.
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
