//! Worker's variables by name, and which of them are copies of another worker's.
//!
//! A layer that shares another layer's variables (`Layers::add_sharing`) makes its own copies if the other layer
//! is on another worker. Only the owner's variables are saved and optimized. Every step sends a copy's gradient to
//! the owner, and every change of the owner's value reaches its copies before the next step:
//! [`Variables::changed`] lists the variables that changed.

use std::collections::{HashMap, HashSet};

use brimful_torch::autograd::set_gradient;
use brimful_torch::foreach;
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::Result;
use crate::pipeline::stage_layout::StageLayout;

/// Variable of one worker.
#[derive(Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// Whether the variable is a parameter, frozen or not, instead of a running statistic.
    pub(crate) trainable: bool,
    /// Worker of the layer that the variable belongs to.
    pub(crate) owner: usize,
    /// Places of the worker's stages that use the variable.
    stages: Vec<usize>,
}

/// State of a variable that its copies must match, without the values: address, version, dtype, and whether it is
/// trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VariableMark {
    place: usize,
    version: i64,
    kind: Kind,
    trained: bool,
}

impl VariableMark {
    /// Reads the tensor's state; returns none if libtorch does not count the tensor's changes.
    fn of(tensor: &Tensor) -> Option<Self> {
        let version = tensor.f_internal_version().ok()?;
        Some(Self {
            place: tensor.data_ptr() as usize,
            version,
            kind: tensor.kind(),
            trained: tensor.requires_grad(),
        })
    }
}

/// Variables of one worker, in the order of their names.
#[derive(Debug)]
pub(crate) struct Variables {
    worker: usize,
    /// Index of the pipeline in this process: all variables of later pipelines are copies of the first pipeline's.
    replica: usize,
    list: Vec<Variable>,
    /// Places of variables that have copies elsewhere, each with its state when all copies were last updated.
    shared: Vec<(usize, Option<VariableMark>)>,
}

impl Variables {
    pub(crate) fn of(
        store: &VarStore,
        layout: &StageLayout,
        worker: usize,
        replica: usize,
    ) -> Self {
        let owner = |name: &str| {
            layout.position_of(name).map_or(worker, |position| layout.worker_of(position))
        };
        let stages = |name: &str| {
            let own = layout.of_worker(worker).enumerate();
            own.filter(|(_, (_, plan))| layout.uses(plan, name)).map(|(at, _)| at).collect()
        };
        let trainable: Vec<_> = store.trainable_variables().iter().map(Tensor::data_ptr).collect();
        let variable = |(name, tensor): (String, Tensor)| Variable {
            owner: owner(&name),
            stages: stages(&name),
            trainable: trainable.contains(&tensor.data_ptr()),
            tensor,
            name,
        };
        let mut list: Vec<_> = store.variables().into_iter().map(variable).collect();
        // Sorted, because the store has no order: replicas match gradients by place, and `find` is a binary
        // search.
        list.sort_by(|a, b| a.name.cmp(&b.name));
        Self { worker, replica, list, shared: Vec::new() }
    }

    /// Marks the variables of these names as having copies elsewhere.
    pub(crate) fn share(&mut self, names: &[String]) {
        let names: HashSet<&str> = names.iter().map(String::as_str).collect();
        let shared = self.list.iter().enumerate();
        let shared = shared.filter(|(_, v)| self.owns(v) && names.contains(v.name.as_str()));
        self.shared = shared.map(|(at, _)| (at, None)).collect();
    }

    /// Returns the variables whose copies may differ by now.
    pub(crate) fn changed(&self) -> impl Iterator<Item = &Variable> {
        // Running statistics always count as changed: a copy may have updated its own.
        let changed = |(at, seen): &&(usize, Option<VariableMark>)| {
            let Variable { tensor, trainable, .. } = &self.list[*at];
            // Without a mark, it is unknown whether the variable has changed.
            !trainable || seen.is_none() || *seen != VariableMark::of(tensor)
        };
        self.shared.iter().filter(changed).map(|(at, _)| &self.list[*at])
    }

    /// Marks all variables with copies as changed, so that all copies follow before the next step. Used when
    /// a copy itself may have changed.
    pub(crate) fn compare_anew(&mut self) {
        self.shared.iter_mut().for_each(|(_, seen)| *seen = None);
    }

    /// Marks all copies as equal to their owners.
    pub(crate) fn followed(&mut self) {
        let list = &self.list;
        self.shared.iter_mut().for_each(|(at, seen)| *seen = VariableMark::of(&list[*at].tensor));
    }

    pub(crate) fn zero_grad(&self) -> Result<()> {
        self.list.iter().try_for_each(|v| Ok(set_gradient(&mut v.tensor.shallow_clone(), None)?))
    }

    /// Returns all variables, copies included.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Variable> {
        self.list.iter()
    }

    /// Returns the variables that are not copies.
    pub(crate) fn owned(&self) -> impl Iterator<Item = &Variable> {
        self.list.iter().filter(|variable| self.owns(variable))
    }

    /// Returns whether this worker owns the variable: then it is no copy.
    pub(crate) fn owns(&self, variable: &Variable) -> bool {
        variable.owner == self.worker && self.replica == 0
    }

    /// Returns the variables that get gradients: parameters that are not frozen.
    pub(crate) fn trained(&self) -> impl Iterator<Item = &Variable> {
        self.list.iter().filter(|variable| variable.trainable && variable.tensor.requires_grad())
    }

    /// Returns the places of each stage's parameters in the list of `trained`. A parameter with two names has
    /// its gradient at the first.
    pub(crate) fn trained_by_stage(&self, stages: usize) -> Vec<Vec<usize>> {
        let mut all = vec![Vec::new(); stages];
        let mut first = HashMap::new();
        for (place, variable) in self.trained().enumerate() {
            let tensor = &variable.tensor;
            let numbers = if tensor.numel() > 0 { Ok(tensor.data_ptr()) } else { Err(place) };
            let place = *first.entry(numbers).or_insert(place);
            variable.stages.iter().for_each(|stage| all[*stage].push(place));
        }
        all
    }

    /// Sets the variables of these names to these values, whose shapes fit.
    pub(crate) fn set(&self, values: &[(String, Tensor)]) -> Result<()> {
        let pairs = values.iter().filter_map(|(name, value)| Some((self.find(name)?, value)));
        copy(pairs.map(|(variable, value)| (&variable.tensor, value)))
    }

    /// Makes copies equal to their owners, found by name: values, dtype, and whether they are trained.
    pub(crate) fn follow(&self, owners: &[(String, Tensor)]) -> Result<()> {
        let pairs = owners.iter().filter_map(|(name, owner)| Some((self.find(name)?, owner)));
        let pairs = pairs.filter(|(variable, _)| !self.owns(variable));
        let mut alike = Vec::new();
        for (copy, owner) in pairs {
            let mut own = copy.tensor.shallow_clone();
            if own.kind() == owner.kind() {
                alike.push((own.shallow_clone(), owner));
            } else {
                // Copied, because on one device `to_device` returns the owner's own memory.
                let value = owner.f_detach()?.f_to_device(own.device())?.f_detach_copy()?;
                tch::no_grad(|| own.set_data(&value));
            }
            if copy.trainable && own.requires_grad() != owner.requires_grad() {
                let _itself = own.f_set_requires_grad(owner.requires_grad())?;
            }
        }
        copy(alike.iter().map(|(own, owner)| (own, *owner)))
    }

    fn find(&self, name: &str) -> Option<&Variable> {
        let at = self.list.binary_search_by(|variable| variable.name.as_str().cmp(name)).ok()?;
        Some(&self.list[at])
    }
}

/// Copies each second tensor's values into the first.
fn copy<'a>(pairs: impl Iterator<Item = (&'a Tensor, &'a Tensor)>) -> Result<()> {
    let mut into = Vec::new();
    let mut from = Vec::new();
    for (own, value) in pairs {
        // Detached: autograd refuses to write into a trained leaf.
        into.push(own.f_detach()?);
        from.push(value.f_detach()?);
    }
    if into.is_empty() { Ok(()) } else { Ok(foreach::copy(&into, &from)?) }
}
