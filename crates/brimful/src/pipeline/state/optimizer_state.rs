//! State of a pipeline's optimizer, in the form of one optimizer over all parameters: it does not depend on
//! the balance.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::optimizer::{PipelineOptimizer, names, optimizer};
use crate::Result;
use crate::optim::{OptimError, Optimizer};
use crate::save::{self, Metadata};

impl PipelineOptimizer {
    /// Returns the whole state in the form of [`Optimizer::state`]. In a world, all ranks call it: rank 0
    /// gets all of it, the others their own parts.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn state(&self) -> Result<(Vec<(String, Tensor)>, Metadata)> {
        let parts = self.workers.lock_outside_step()?.all(|worker| Ok(optimizer(worker)?.state()));
        let (tensors, metadata) = match parts {
            Ok(parts) => {
                let (tensors, metadata): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
                (Ok(tensors), Ok(metadata))
            }
            Err(error) => (Err(error.clone()), Err(error)),
        };
        let metadata = self.ranks.of_workers("optimizer state", metadata)?;
        Ok((self.ranks.gather(tensors)?, metadata.into_iter().flatten().collect()))
    }

    /// Writes the state to a safetensors file, atomically. In a world, all ranks call it and rank 0 writes.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let (tensors, metadata) = self.state()?;
        self.ranks.on_first("save", || save::write(path, &tensors, &metadata))
    }

    /// Reads the state from a file of a pipeline's optimizer or an [`Optimizer`].
    ///
    /// # Errors
    /// When the file cannot be read, or as [`Optimizer::load_state`]; nothing is changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let (tensors, metadata) = self.ranks.all_or_none("load", || save::read(path))?;
        self.load_state(&tensors, &metadata)
    }

    /// Loads a state of [`PipelineOptimizer::state`] or [`Optimizer::state`].
    ///
    /// # Errors
    /// As [`Optimizer::load_state`]; nothing is changed then.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)], metadata: &Metadata) -> Result<()> {
        let workers = self.workers.lock_outside_step()?;
        let known = workers.all(|worker| Ok(Known::of(optimizer(worker)?)));
        let known = self.ranks.of_workers("load state", known)?;
        let portions = || portions(&known, tensors, metadata);
        let mut parts = self.ranks.all_or_none("load state", portions)?;
        let parts = parts.drain(self.ranks.here()).collect();
        // All workers read the state before one takes it over, so nothing needs an undo.
        let read = self.ranks.all_or_none("load state", || {
            workers.each_or_error(parts, |worker, (tensors, metadata)| {
                optimizer(worker)?.read_state(&tensors, &metadata)
            })
        })?;
        let rates = workers.each_or_error(read, |worker, read| {
            let optimizer = optimizer(worker)?;
            optimizer.take_state(read);
            Ok(optimizer.learning_rate())
        })?;
        drop(workers);
        self.learning_rate = rates[0];
        Ok(())
    }
}

/// Parameters and groups of a worker's optimizer.
#[derive(Serialize, Deserialize)]
struct Known {
    parameters: BTreeSet<String>,
    groups: BTreeSet<String>,
}

impl Known {
    fn of(optimizer: &Optimizer) -> Self {
        let parameters = names(optimizer).into_iter().collect();
        Self { parameters, groups: optimizer.groups().map(str::to_owned).collect() }
    }
}

type State = (Vec<(String, Tensor)>, Metadata);

/// Splits a whole state by worker; fails if a part belongs to no worker.
fn portions(
    known: &[Known],
    tensors: &[(String, Tensor)],
    metadata: &Metadata,
) -> Result<Vec<State>> {
    let mut parts: Vec<State> = known.iter().map(|_| State::default()).collect();
    let of_parameter = |name: &str| known.iter().position(|known| known.parameters.contains(name));
    let left = |name: &str, saved: &str| {
        Err(OptimError::StateMismatch {
            name: name.into(),
            saved: saved.into(),
            here: "missing".into(),
        }
        .into())
    };
    for (name, tensor) in tensors {
        let parameter = name.rsplit_once('.').map_or("", |(parameter, _)| parameter);
        let Some(worker) = of_parameter(parameter) else { return left(name, "a tensor") };
        parts[worker].0.push((name.clone(), tensor.shallow_clone()));
    }
    for (key, text) in metadata {
        let mut put = |worker: usize| drop(parts[worker].1.insert(key.clone(), text.clone()));
        if let Some(parameter) = key.strip_prefix("parameter.") {
            let Some(worker) = of_parameter(parameter) else { return left(parameter, "there") };
            put(worker);
        } else if let Some(group) = key.strip_prefix("group.") {
            let has = |(_, known): &(usize, &Known)| known.groups.contains(group);
            let workers: Vec<_> = known.iter().enumerate().filter(has).map(|(w, _)| w).collect();
            if workers.is_empty() {
                return left(group, "a group");
            }
            workers.into_iter().for_each(put);
        } else {
            (0..known.len()).for_each(put);
        }
    }
    Ok(parts)
}
