//! One stage at work: its layers on a micro-batch, with the skips that come in and go out.

use std::cell::Cell;

use tch::Tensor;

use crate::Result;
use crate::layers::{Model, Stashed};
use crate::pipeline::build::{Export, StagePlan};
use crate::random::{Draws, Generator};
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
}

/// One run over a micro-batch: what it draws, and where it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StagePass<'a> {
    pub(crate) generator: &'a Generator,
    pub(crate) draws: Draws,
    pub(crate) train: bool,
    /// The position of the layer that is running.
    pub(crate) layer: &'a Cell<Option<usize>>,
}

impl Stage {
    pub(crate) fn new(id: StageId, model: Model, plan: &StagePlan) -> Self {
        Self { id, model, imports: plan.imports.clone(), exports: plan.exports.clone() }
    }

    /// Runs the layers.
    ///
    /// # Panics
    /// When one of them does.
    pub(crate) fn run(&self, input: Boundary, pass: StagePass<'_>) -> Boundary {
        let mut stashed = Stashed::default();
        for (stash, values) in self.imports.iter().zip(input.skips) {
            stashed.put(*stash, values);
        }
        let values = self.model.run(input.values, &mut stashed, pass.train, |position| {
            pass.layer.set(Some(position));
            pass.generator.seed(pass.draws.seed(position));
        });
        pass.layer.set(None);
        let leaving = |export: &Export| stashed.take(export.stash).unwrap_or_default();
        Boundary { values, skips: self.exports.iter().map(leaving).collect() }
    }
}

impl Boundary {
    /// All tensors, the values first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Tensor> {
        self.values.iter().chain(self.skips.iter().flatten())
    }

    /// The same tensors, not copied.
    pub(crate) fn share(&self) -> Self {
        let share = |values: &Vec<Tensor>| values.iter().map(Tensor::shallow_clone).collect();
        Self { values: share(&self.values), skips: self.skips.iter().map(share).collect() }
    }
}

/// The tensors as the next stage gets them: without the graph behind them, and with a gradient where
/// `traced` says so.
pub(crate) fn leaves(values: &[Tensor], traced: impl Fn(&Tensor) -> bool) -> Result<Vec<Tensor>> {
    let leaf = |value: &Tensor| Ok(value.f_detach()?.f_set_requires_grad(traced(value))?);
    values.iter().map(leaf).collect()
}
