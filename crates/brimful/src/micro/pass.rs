//! Forward and backward of one micro-batch, added to the sums of its mini-batch.

use brimful_torch::grad_mode::GradMode;
use brimful_torch::leaves::{KnownLeaves, other_leaf};
use tch::Tensor;

use crate::Result;
use crate::accumulate::Accumulator;
use crate::batch::{Batch, detached};
use crate::loss::{IntoLoss, MicroBatchWeight, Term};
use crate::step::{Tally, TermGroup, roots};

/// A mini-batch while it is running.
#[derive(Debug)]
pub(super) struct BatchPass<O> {
    pub(super) accumulator: Accumulator,
    pub(super) tally: Tally,
    pub(super) outputs: Vec<O>,
    /// True if the mini-batch is a whole step, and no other follows.
    pub(super) single: bool,
}

impl<O> BatchPass<O> {
    pub(super) fn groups(&self) -> Vec<TermGroup> {
        self.tally.groups(self.single)
    }
}

impl<O: Batch> BatchPass<O> {
    /// Runs the closure on a micro-batch, and its backward.
    pub(super) fn run<B: Batch, R: IntoLoss<Outputs = O>>(
        &mut self,
        micro_batch: B,
        weight: &MicroBatchWeight,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<()> {
        // A grad mode that the closure sets and does not restore ends with its micro-batch.
        let graphs = GradMode::set(true);
        let returned = f(micro_batch);
        drop(graphs);
        let (loss, output) = returned.into_parts()?;
        self.add(&loss.into_terms(true)?, &output, weight)
    }

    /// Adds the results of a forward.
    pub(super) fn add(
        &mut self,
        terms: &[Term],
        output: &O,
        weight: &MicroBatchWeight,
    ) -> Result<()> {
        self.tally.count(terms, weight)?;
        self.backward(terms, |_, term| term.root_gradient(weight))?;
        // Detached from its graph: otherwise every micro-batch's activations would live as long as the outputs.
        self.outputs.push(detached(output)?);
        Ok(())
    }

    /// Runs each group's backward from the gradient that `root` returns for a term and the term's index. Keeps the
    /// autograd graph until the last group.
    pub(super) fn backward(
        &mut self,
        terms: &[Term],
        root: impl Fn(usize, &Term) -> Result<Option<Tensor>>,
    ) -> Result<()> {
        let groups = roots(terms, &self.groups(), root)?;
        self.accumulator.expect_groups(groups.len());
        // Groups share the forward's graph: only the last may free it.
        let last = groups.iter().rposition(|roots| !roots.is_empty());
        for (index, roots) in groups.iter().enumerate().filter(|(_, roots)| !roots.is_empty()) {
            self.accumulator.add(index, roots, &[], Some(index) != last)?;
        }
        Ok(())
    }

    /// Returns a leaf that the backward of these terms would reach besides the parameters.
    pub(super) fn other_leaf(&self, terms: &[Term]) -> Result<Option<Tensor>> {
        let roots = terms.iter().map(|term| &term.value);
        Ok(other_leaf(roots, &KnownLeaves::new(self.accumulator.own_parameters())?)?)
    }
}
