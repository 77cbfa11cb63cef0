//! Losses over the outputs of the whole mini-batch, such as contrastive ones.
//!
//! ```text
//!   1. every micro-batch forward                     → outputs of the whole mini-batch
//!   2. the loss on all of them, and its backward     → a gradient for each output
//!   3. every micro-batch backward from its rows of the gradients
//! ```
//!
//! Each engine runs steps 1 and 3 in its own way: a pipeline keeps its graphs from 1 to 3, and the other engines
//! run forward twice.

use std::ops::Range;

use tch::{Device, Tensor};

use super::StepError;
use crate::Result;
use crate::batch::{self, Batch, Leaf, as_wide_as};

/// Returns the outputs as leaves of a new graph, at which the loss's backward ends.
pub(crate) fn as_leaves<O: Batch>(outputs: &O) -> Result<O> {
    let mut count = 0;
    outputs.map(&mut |leaf| {
        count += 1;
        match leaf {
            Leaf::Shared(_) => Err(StepError::OutputNotRows { leaf: count - 1 }.into()),
            leaf => {
                let leaf = leaf.tensor().f_detach()?;
                // Integers, such as labels that were passed through, cannot have a gradient.
                Ok(if leaf.is_floating_point() { leaf.set_requires_grad(true) } else { leaf })
            }
        }
    })
}

/// Each output's gradient, cut into the rows of micro-batches.
#[derive(Debug)]
pub(crate) struct RowGradients(Vec<Option<Tensor>>);

impl RowGradients {
    /// Takes the gradients that a loss's backward has left in its leaves.
    pub(crate) fn of(leaves: &impl Batch) -> Self {
        let gradients = batch::leaves(leaves).into_iter().map(|leaf| leaf.tensor().grad());
        Self(gradients.map(|gradient| gradient.defined().then_some(gradient)).collect())
    }

    /// Returns whether no output has a gradient.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Cuts out the gradients of these rows.
    pub(crate) fn rows(&self, rows: &Range<usize>) -> Result<Self> {
        self.each(|gradient| gradient.f_narrow(0, rows.start as i64, rows.len() as i64))
    }

    /// Copies the gradients to this device.
    pub(crate) fn on(&self, device: Device) -> Result<Self> {
        self.each(|gradient| gradient.f_to_device(device))
    }

    fn each(&self, f: impl Fn(&Tensor) -> Result<Tensor, tch::TchError>) -> Result<Self> {
        let gradients = self.0.iter().map(|gradient| gradient.as_ref().map(&f).transpose());
        Ok(Self(gradients.collect::<Result<_, _>>()?))
    }

    /// Returns the gradients, by output.
    pub(crate) fn into_tensors(self) -> Vec<Option<Tensor>> {
        self.0
    }

    /// Returns the outputs of a micro-batch that a backward starts from, each with its gradient.
    pub(crate) fn roots(self, outputs: &impl Batch) -> Result<Vec<(&Tensor, Tensor)>> {
        let outputs = batch::leaves(outputs).into_iter().map(Leaf::tensor);
        let mut roots = Vec::new();
        for (leaf, (output, gradient)) in outputs.zip(self.0).enumerate() {
            let Some(gradient) = gradient.filter(|_| output.requires_grad()) else { continue };
            if output.size().first() != gradient.size().first() {
                return Err(StepError::OutputNotRows { leaf }.into());
            }
            roots.push((output, as_wide_as(output, gradient)?));
        }
        Ok(roots)
    }
}
