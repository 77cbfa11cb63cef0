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

/// How large a parameter's gradient is beside all of them for its own rounding to matter.
const BESIDE: f64 = 0.1;

/// Compares losses and gradients of a model whose numbers are of this kind. The replayed gradients
/// are used up.
pub(super) fn verdict(
    kind: Kind,
    eager: &[Sum],
    eager_loss: &Readout,
    replayed: &[Sum],
    replayed_loss: &Readout,
) -> Result<Verdict> {
    let pairs: Vec<(&Tensor, &Tensor)> = (eager.iter().flatten())
        .zip(replayed.iter().flatten())
        .filter_map(|(eager, replayed)| eager.as_ref().zip(replayed.as_ref()))
        .collect();
    let tolerance = tolerance(kind);
    let list =
        |which: fn(&(&Tensor, &Tensor)) -> Tensor| pairs.iter().map(which).collect::<Vec<_>>();
    let (eager, replayed) = (list(|p| p.0.shallow_clone()), list(|p| p.1.shallow_clone()));
    foreach::add(&replayed, &eager, -1.0)?;
    let (sizes, errors) = (norms(&eager)?, norms(&replayed)?);
    let (expected, got) = (numbers(eager_loss.row())?, numbers(replayed_loss.row())?);

    if !expected.iter().chain(&sizes).all(|number| number.is_finite()) {
        return Ok(Verdict::Unknown);
    }
    let near = |a: f64, b: f64| (a - b).abs() <= tolerance * a.abs().max(f64::MIN_POSITIVE);
    if let Some((a, b)) = expected.iter().zip(&got).find(|(a, b)| !near(**a, **b)) {
        return Ok(Verdict::Differs(format!("a replay gives a loss of {b}, not {a}")));
    }
    let all = sizes.iter().map(|size| size * size).sum::<f64>().sqrt();
    let small = |size: f64, error: f64| error <= tolerance * (size + BESIDE * all);
    Ok(match sizes.iter().zip(&errors).find(|(size, error)| !small(**size, **error)) {
        Some((size, error)) => Verdict::Differs(format!(
            "a replay gives another gradient: it is off by {error:.3e} of {size:.3e}"
        )),
        None => Verdict::Alike,
    })
}

/// Running statistics and other variables without a gradient, as they were.
#[derive(Debug)]
pub(super) struct Buffers {
    now: Vec<Tensor>,
    before: Vec<Tensor>,
}

impl Buffers {
    pub(super) fn save(now: &[Tensor]) -> Result<Self> {
        let before = now.iter().map(Tensor::f_detach_copy).collect::<Result<_, _>>()?;
        Ok(Self { now: now.iter().map(Tensor::shallow_clone).collect(), before })
    }

    pub(super) fn restore(self) -> Result<()> {
        Ok(foreach::copy(&self.now, &self.before)?)
    }
}

/// What kernels may differ by that add in another order each time.
fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-8,
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
