//! Skip connections: which pops belong to which stash, and what is stashed while a model runs.

use tch::Tensor;

use super::LayersError;
use super::description::Description;
use crate::Result;

/// A skip connection, its layers by position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skip {
    /// The layer that stashes.
    pub stash: usize,
    /// The layers that pop, in order; one at least.
    pub pops: Vec<usize>,
}

/// The name that a pop asks for, and the list that it stands in.
#[derive(Debug, Clone)]
pub(super) struct Name {
    /// The outer lists' names, joined and with a dot at the end; empty in the outermost.
    scope: String,
    skip: String,
}

impl Name {
    pub(super) fn new(skip: String) -> Self {
        Self { scope: String::new(), skip }
    }

    pub(super) fn inside(self, outer: &str) -> Self {
        Self { scope: format!("{outer}.{}", self.scope), ..self }
    }

    /// The names that it may stand for: in its own list, then in each one around it.
    fn candidates(&self) -> impl Iterator<Item = String> {
        let ends = self.scope.rmatch_indices('.').map(|(dot, _)| dot + 1).chain([0]);
        ends.map(|end| format!("{}{}", &self.scope[..end], self.skip))
    }
}

/// Pairs every stash of a list, whose names are right, with its pops.
pub(super) fn pair(list: &[Description]) -> Result<Vec<Skip>> {
    let stashes = list.iter().enumerate().filter(|(_, layer)| layer.stashes);
    let mut skips: Vec<_> = stashes.map(|(stash, _)| Skip { stash, pops: Vec::new() }).collect();
    for (position, layer) in list.iter().enumerate() {
        let Some(skip) = &layer.pops else { continue };
        let named = |name: String| skips.iter().position(|skip| list[skip.stash].name == name);
        let Some(found) = skip.candidates().find_map(named) else {
            let (name, skip) = (layer.name.clone(), skip.skip.clone());
            return Err(LayersError::SkipUnknown { position, name, skip }.into());
        };
        let stash = skips[found].stash;
        if stash > position {
            let (name, skip) = (layer.name.clone(), list[stash].name.clone());
            return Err(LayersError::SkipTooEarly { position, name, skip, stash }.into());
        }
        skips[found].pops.push(position);
    }
    match skips.iter().find(|skip| skip.pops.is_empty()) {
        Some(&Skip { stash, .. }) => {
            Err(LayersError::SkipUnused { position: stash, skip: list[stash].name.clone() }.into())
        }
        None => Ok(skips),
    }
}

/// What has been stashed and not yet popped for the last time, by the position of the stash.
#[derive(Debug, Default)]
pub(crate) struct Stashed {
    values: Vec<(usize, Vec<Tensor>)>,
}

impl Stashed {
    /// Keeps what the layer at `stash` has stashed.
    pub(crate) fn put(&mut self, stash: usize, values: Vec<Tensor>) {
        self.values.push((stash, values));
    }

    /// What the layer at `stash` has stashed, which another may still pop.
    pub(crate) fn share(&self, stash: usize) -> Option<Vec<Tensor>> {
        let found = self.values.iter().find(|(position, _)| *position == stash);
        found.map(|(_, values)| values.iter().map(Tensor::shallow_clone).collect())
    }

    /// The same, out of here.
    pub(crate) fn take(&mut self, stash: usize) -> Option<Vec<Tensor>> {
        let at = self.values.iter().position(|(position, _)| *position == stash)?;
        Some(self.values.swap_remove(at).1)
    }

    /// All tensors.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Tensor> {
        self.values.iter().flat_map(|(_, values)| values)
    }

    /// The same skips with other tensors.
    pub(crate) fn map(&self, f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>) -> Result<Self> {
        let values = self.values.iter().map(|(stash, values)| Ok((*stash, f(values)?)));
        Ok(Self { values: values.collect::<Result<_>>()? })
    }
}
