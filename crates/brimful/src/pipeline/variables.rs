//! A worker's variables by name, and which of them are copies of another worker's.
//!
//! A layer that shares another one's variables (`Layers::add_sharing`) makes its own copy of them
//! where the other lives on another worker. The owner's is the one that counts: it is saved and
//! optimized. A copy's gradient goes to the owner with every step, the owner's value comes back
//! with every change.

use std::collections::HashMap;

use brimful_torch::foreach;
use tch::Tensor;
use tch::nn::VarStore;

use super::layout::Layout;
use crate::Result;

/// A variable of one worker.
#[derive(Debug)]
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) tensor: Tensor,
    /// A parameter, frozen or not; no running statistic.
    pub(super) trainable: bool,
    /// The worker of the layer that it belongs to.
    pub(super) owner: usize,
}

/// The variables of one worker, in the order of their names.
#[derive(Debug)]
pub(super) struct Variables {
    worker: usize,
    list: Vec<Variable>,
}

impl Variables {
    pub(super) fn of(store: &VarStore, layout: &Layout, worker: usize) -> Self {
        let positions: HashMap<&str, usize> =
            layout.layers.names().enumerate().map(|(position, name)| (name, position)).collect();
        let owner = |name: &str| {
            let mut layers = name.match_indices('.').map(|(dot, _)| &name[..dot]);
            let position = layers.find_map(|layer| positions.get(layer));
            position.map_or(worker, |position| layout.worker_of(*position))
        };
        let trainable: Vec<_> = store.trainable_variables().iter().map(Tensor::data_ptr).collect();
        let variable = |(name, tensor): (String, Tensor)| Variable {
            owner: owner(&name),
            trainable: trainable.contains(&tensor.data_ptr()),
            tensor,
            name,
        };
        let mut list: Vec<_> = store.variables().into_iter().map(variable).collect();
        list.sort_by(|a, b| a.name.cmp(&b.name));
        Self { worker, list }
    }

    /// All of them, copies included.
    pub(super) fn all(&self) -> impl Iterator<Item = &Variable> {
        self.list.iter()
    }

    /// Those that are no copies.
    pub(super) fn owned(&self) -> impl Iterator<Item = &Variable> {
        self.list.iter().filter(|variable| variable.owner == self.worker)
    }

    /// Copies of another worker's.
    pub(super) fn copies(&self) -> impl Iterator<Item = &Variable> {
        self.list.iter().filter(|variable| variable.owner != self.worker)
    }

    /// The variables that get gradients: parameters that are not frozen.
    pub(super) fn trained(&self) -> impl Iterator<Item = &Variable> {
        self.list.iter().filter(|variable| variable.trainable && variable.tensor.requires_grad())
    }

    /// Gives the variables of these names these values, which fit.
    pub(super) fn set(&self, values: &[(String, Tensor)]) -> Result<()> {
        self.set_those(values, |_| true)
    }

    /// The same for copies alone.
    pub(super) fn set_copies(&self, values: &[(String, Tensor)]) -> Result<()> {
        self.set_those(values, |variable| variable.owner != self.worker)
    }

    fn set_those(
        &self,
        values: &[(String, Tensor)],
        those: impl Fn(&Variable) -> bool,
    ) -> Result<()> {
        let (mut into, mut from) = (Vec::new(), Vec::new());
        for (name, value) in values {
            let variable = self.list.iter().find(|variable| variable.name == *name);
            if let Some(variable) = variable.filter(|variable| those(variable)) {
                into.push(variable.tensor.f_detach()?);
                from.push(value.shallow_clone());
            }
        }
        if into.is_empty() { Ok(()) } else { Ok(foreach::copy(&into, &from)?) }
    }
}
