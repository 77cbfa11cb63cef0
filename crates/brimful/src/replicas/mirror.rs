//! Copies the first replica's variables to the others.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;

use brimful_torch::foreach;
use tch::Tensor;
use tch::nn::VarStore;

use super::error::ReplicasError;
use crate::Result;

/// Pairs of a replica's own variables and the first one's.
#[derive(Debug, Default)]
pub(super) struct Mirror {
    pairs: Vec<(Tensor, Tensor)>,
}

impl Mirror {
    /// Pairs two lists of one model's variables, both in the order of their names.
    pub(super) fn new(own: Vec<(String, Tensor)>, first: Vec<(String, Tensor)>) -> Self {
        let pairs = own.into_iter().zip(first).map(|((_, own), (_, first))| (own, first));
        Self { pairs: pairs.collect() }
    }

    /// Copies values, dtypes, and which variables are frozen.
    pub(super) fn take_over(&mut self) -> Result<()> {
        let _without = tch::no_grad_guard();
        // Gathered, so that a few kernels copy all: this runs before every step.
        let mut into = Vec::new();
        let mut from = Vec::new();
        for (own, first) in &mut self.pairs {
            let value = first.f_detach()?;
            if own.kind() == value.kind() {
                into.push(own.f_detach()?);
                from.push(value);
            } else {
                // Another dtype cannot be copied in place; CUDA graphs then see the new address.
                own.set_data(&value.f_to_device(own.device())?.f_detach_copy()?);
            }
            if own.requires_grad() != first.requires_grad() {
                let _itself = own.f_set_requires_grad(first.requires_grad())?;
            }
        }
        Ok(foreach::copy(&into, &from)?)
    }

    /// Maps the address of each of this replica's variables to the first replica's variable.
    pub(super) fn twins(&self) -> HashMap<*mut c_void, Tensor> {
        let pairs = self.pairs.iter();
        pairs.map(|(own, first)| (own.data_ptr(), first.shallow_clone())).collect()
    }
}

/// Description of a model's variables, without their values.
#[derive(Debug)]
pub(super) struct ModelOutline {
    named: BTreeMap<String, String>,
    /// Names of the trainable variables, in the order in which they were made.
    trainable: Vec<String>,
}

impl ModelOutline {
    pub(super) fn of(store: &VarStore) -> Self {
        let named = store.variables();
        let names: HashMap<_, _> = named.iter().map(|(name, t)| (t.data_ptr(), name)).collect();
        let name = |tensor: &Tensor| names.get(&tensor.data_ptr()).map(|name| (*name).clone());
        let trainable = store.trainable_variables().iter().filter_map(name).collect();
        let described = named.iter().map(|(name, tensor)| {
            (name.clone(), format!("a {:?} tensor of shape {:?}", tensor.kind(), tensor.size()))
        });
        Self { named: described.collect(), trainable }
    }
}

/// Checks that all replicas have the first one's variables.
pub(super) fn check_alike(outlines: &[ModelOutline]) -> Result<()> {
    let Some((first, others)) = outlines.split_first() else { return Ok(()) };
    for (replica, other) in (1..).zip(others) {
        let mut names = first.named.keys().chain(other.named.keys());
        let differs = |variable: &String, first: String, here: String| {
            Err(ReplicasError::ModelsDiffer { replica, variable: variable.clone(), first, here })
        };
        if let Some(name) = names.find(|name| first.named.get(*name) != other.named.get(*name)) {
            let describe = |outline: &ModelOutline| {
                outline.named.get(name).map_or("missing", String::as_str).to_owned()
            };
            differs(name, describe(first), describe(other))?;
        }
        let mut pairs = first.trainable.iter().zip(&other.trainable).enumerate();
        if let Some((place, (name, another))) = pairs.find(|(_, (a, b))| a != b) {
            differs(name, format!("parameter {place}"), format!("'{another}' in its place"))?;
        }
        if first.trainable.len() != other.trainable.len() {
            let count =
                |outline: &ModelOutline| format!("one of {} trained", outline.trainable.len());
            let name = first.trainable.last().or(other.trainable.last());
            differs(name.unwrap_or(&String::new()), count(first), count(other))?;
        }
    }
    Ok(())
}
