//! Runs one stage: its layers on a micro-batch, with the skips that enter and leave.

use tch::Tensor;

use crate::Result;
use crate::layers::{Model, Stashed};
use crate::nn::{ExactNorm, NormStatistics};
use crate::pipeline::stage_layout::{Export, StagePlan};
use brimful_plan::schedule::StageId;

/// Consecutive layers on one device.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) id: StageId,
    model: Model,
    imports: Vec<usize>,
    exports: Vec<Export>,
}

/// Input or output of a stage: the values, and the skips beside them.
#[derive(Debug, Default)]
pub(crate) struct Boundary {
    pub(crate) values: Vec<Tensor>,
    pub(crate) skips: Vec<Vec<Tensor>>,
    /// Statistics that normalise the first value if the stage begins with an exact BatchNorm.
    pub(crate) norm: Option<NormStatistics>,
}

impl Stage {
    pub(crate) fn new(id: StageId, model: Model, plan: &StagePlan) -> Self {
        Self { id, model, imports: plan.imports.clone(), exports: plan.exports.clone() }
    }

    /// Runs the layers; calls `before` with each layer's position.
    ///
    /// # Panics
    /// When a layer does.
    pub(crate) fn run(&self, input: Boundary, train: bool, before: impl FnMut(usize)) -> Boundary {
        let norm = self.exact_norm().zip(input.norm);
        let _lent = norm.map(|(norm, met)| norm.lend(met));
        let mut stashed = Stashed::default();
        for (stash, values) in self.imports.iter().zip(input.skips) {
            stashed.put(*stash, values);
        }
        let values = self.model.run(input.values, &mut stashed, train, before);
        let outgoing = |export: &Export| stashed.take(export.stash).unwrap_or_default();
        Boundary { values, skips: self.exports.iter().map(outgoing).collect(), norm: None }
    }

    /// Returns the target stages of each export.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &[usize]> {
        self.exports.iter().map(|export| export.targets.as_slice())
    }

    /// Returns the exact BatchNorm that the stage begins with.
    pub(crate) fn exact_norm(&self) -> Option<&ExactNorm> {
        self.model.exact_norm()
    }
}

impl Boundary {
    /// Returns all tensors, the values first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Tensor> {
        self.values.iter().chain(self.skips.iter().flatten())
    }

    /// Returns the leaves that accumulate gradients: of the values, of each skip, and of the normalising
    /// statistics.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = &[Tensor]> {
        let probes = self.norm.iter().map(|met| met.probes.as_slice());
        let skips = self.skips.iter().map(Vec::as_slice);
        std::iter::once(self.values.as_slice()).chain(skips).chain(probes)
    }

    /// Returns shallow clones of all tensors.
    pub(crate) fn share(&self) -> Self {
        let share = |values: &Vec<Tensor>| values.iter().map(Tensor::shallow_clone).collect();
        Self {
            values: share(&self.values),
            skips: self.skips.iter().map(share).collect(),
            norm: self.norm.as_ref().map(NormStatistics::share),
        }
    }
}

/// Detaches the tensors for the next stage; `traced` says which of them require a gradient.
pub(crate) fn leaves(values: &[Tensor], traced: impl Fn(&Tensor) -> bool) -> Result<Vec<Tensor>> {
    let leaf = |value: &Tensor| Ok(value.f_detach()?.f_set_requires_grad(traced(value))?);
    values.iter().map(leaf).collect()
}
