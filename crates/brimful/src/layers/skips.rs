//! Skip connections: the layers that they join, their names, and stashed tensors while a model runs.

use tch::Tensor;

use crate::Result;

/// A skip connection between layers, by their positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skip {
    /// Position of the layer that stashes.
    pub(crate) stash: usize,
    /// Positions of the layers that pop, in order; at least one.
    pub(crate) pops: Vec<usize>,
}

/// Name of a skip that a layer pops, with the list that the layer is in.
#[derive(Debug, Clone)]
pub(super) struct Name {
    /// Names of the outer lists, joined and with a dot at the end; empty in the outermost.
    scope: String,
    pub(super) skip: String,
}

impl Name {
    pub(super) fn new(skip: String) -> Self {
        Self { scope: String::new(), skip }
    }

    pub(super) fn inside(self, outer: &str) -> Self {
        Self { scope: format!("{outer}.{}", self.scope), ..self }
    }

    /// Returns the full names to which this name may refer: in the layer's own list, then in each enclosing list,
    /// the innermost first.
    pub(super) fn candidates(&self) -> impl Iterator<Item = String> {
        let ends = self.scope.rmatch_indices('.').map(|(dot, _)| dot + 1).chain([0]);
        ends.map(|end| format!("{}{}", &self.scope[..end], self.skip))
    }
}

/// Stashed tensors that a later layer still pops, by the position of the stash.
#[derive(Debug, Default)]
pub(crate) struct Stashed {
    values: Vec<(usize, Vec<Tensor>)>,
}

impl Stashed {
    /// Stores the tensors of the stash at this position.
    pub(crate) fn put(&mut self, stash: usize, values: Vec<Tensor>) {
        self.values.push((stash, values));
    }

    /// Returns the tensors of the stash at this position, and keeps them for a later pop.
    pub(crate) fn share(&self, stash: usize) -> Option<Vec<Tensor>> {
        let found = self.values.iter().find(|(position, _)| *position == stash);
        found.map(|(_, values)| values.iter().map(Tensor::shallow_clone).collect())
    }

    /// Removes and returns the tensors of the stash at this position.
    pub(crate) fn take(&mut self, stash: usize) -> Option<Vec<Tensor>> {
        let at = self.values.iter().position(|(position, _)| *position == stash)?;
        Some(self.values.swap_remove(at).1)
    }

    /// Returns all stashed tensors.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Tensor> {
        self.values.iter().flat_map(|(_, values)| values)
    }

    /// Replaces the tensors of each skip by the result of `f`.
    pub(crate) fn map(&self, f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>) -> Result<Self> {
        let values = self.values.iter().map(|(stash, values)| Ok((*stash, f(values)?)));
        Ok(Self { values: values.collect::<Result<_>>()? })
    }
}
