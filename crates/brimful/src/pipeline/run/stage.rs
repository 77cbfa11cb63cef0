//! One stage at work: its layers on a micro-batch, with the skips that come in and go out.

use tch::Tensor;

use crate::Result;
use crate::layers::{Model, Stashed};
use crate::nn::{ExactNorm, Met};
use crate::pipeline::build::{Export, StagePlan};
use crate::schedule::StageId;

/// Consecutive layers on one device.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) id: StageId,
    model: Model,
    imports: Vec<usize>,
    exports: Vec<Export>,
}

/// What enters a stage, or leaves it: the values that flow, and skips beside them.
#[derive(Debug, Default)]
pub(crate) struct Boundary {
    pub(crate) values: Vec<Tensor>,
    pub(crate) skips: Vec<Vec<Tensor>>,
    /// What normalises the first value, where a stage begins with an exact BatchNorm.
    pub(crate) met: Option<Met>,
}

impl Stage {
    pub(crate) fn new(id: StageId, model: Model, plan: &StagePlan) -> Self {
        Self { id, model, imports: plan.imports.clone(), exports: plan.exports.clone() }
    }

    /// Runs the layers; `before` is told the position of each.
    ///
    /// # Panics
    /// When one of them does.
    pub(crate) fn run(&self, input: Boundary, train: bool, before: impl FnMut(usize)) -> Boundary {
        let norm = self.exact_norm().zip(input.met);
        let _lent = norm.map(|(norm, met)| norm.lend(met));
        let mut stashed = Stashed::default();
        for (stash, values) in self.imports.iter().zip(input.skips) {
            stashed.put(*stash, values);
        }
        let values = self.model.run(input.values, &mut stashed, train, before);
        let leaving = |export: &Export| stashed.take(export.stash).unwrap_or_default();
        Boundary { values, skips: self.exports.iter().map(leaving).collect(), met: None }
    }

    /// Of each export, the stages that it goes to.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &[usize]> {
        self.exports.iter().map(|export| export.targets.as_slice())
    }

    /// The exact BatchNorm that it begins with.
    pub(crate) fn exact_norm(&self) -> Option<&ExactNorm> {
        self.model.exact_norm()
    }
}

impl Boundary {
    /// All tensors, the values first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Tensor> {
        self.values.iter().chain(self.skips.iter().flatten())
    }

    /// The leaves that gradients gather in: of the values, of each skip, and of what normalises.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = &[Tensor]> {
        let probes = self.met.iter().map(|met| met.probes.as_slice());
        let skips = self.skips.iter().map(Vec::as_slice);
        std::iter::once(self.values.as_slice()).chain(skips).chain(probes)
    }

    /// The same tensors, not copied.
    pub(crate) fn share(&self) -> Self {
        let share = |values: &Vec<Tensor>| values.iter().map(Tensor::shallow_clone).collect();
        Self {
            values: share(&self.values),
            skips: self.skips.iter().map(share).collect(),
            met: self.met.as_ref().map(Met::share),
        }
    }
}

/// The tensors as the next stage gets them: without the graph behind them, and with a gradient where
/// `traced` says so.
pub(crate) fn leaves(values: &[Tensor], traced: impl Fn(&Tensor) -> bool) -> Result<Vec<Tensor>> {
    let leaf = |value: &Tensor| Ok(value.f_detach()?.f_set_requires_grad(traced(value))?);
    values.iter().map(leaf).collect()
}
