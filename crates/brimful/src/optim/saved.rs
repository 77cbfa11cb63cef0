//! State of a whole optimizer: the tensors and texts of all parts, as `update/saved.rs` lists them.

use std::path::Path;

use tch::Tensor;

use super::Optimizer;
use crate::Result;
use crate::pipeline::settled_optimizer;
use crate::save::{self, Metadata};
use crate::update::OptimizerPart;

impl Optimizer {
    /// Returns the whole state: tensors by name, and texts for the rest. The tensors are the optimizer's own,
    /// which its next step changes. In a pipeline over ranks, rank 0 gets all tensors, and every other rank gets
    /// its own tensors.
    ///
    /// # Errors
    /// When a pipeline's last update fails, or a worker has ended.
    pub fn state(&self) -> Result<(Vec<(String, Tensor)>, Metadata)> {
        let mut parts = self.parts.lock()?;
        let states = parts.all(settled_optimizer, |part| Ok(part.state()));
        let metadata =
            states.as_ref().map(|all| all.iter().map(|(_, texts)| texts.clone()).collect());
        let metadata = parts.ranks.of_workers("optimizer state", metadata.map_err(Clone::clone))?;
        let tensors = states.map(|all| all.into_iter().map(|(tensors, _)| tensors).collect());
        Ok((parts.ranks.gather(tensors)?, metadata.into_iter().flatten().collect()))
    }

    /// Loads a state that [`Optimizer::state`] returned, with the learning rates and options of its groups. The
    /// state does not contain the parameters themselves. The copies are allocated in the arena that the caller has
    /// entered, as [`retry_on_oom`](crate::retry_on_oom()) does, or, with a pipeline, in the arenas of its stages.
    ///
    /// # Errors
    /// When the state belongs to other parameters, shapes, groups or methods (the error names the first
    /// difference), or memory runs out. Nothing is changed then.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)], metadata: &Metadata) -> Result<()> {
        let mut parts = self.parts.lock()?;
        let names = parts.names("load state", settled_optimizer, OptimizerPart::names)?;
        let states = parts.split(
            &names,
            (tensors, metadata),
            |name| name.rsplit_once('.').map_or(name, |(parameter, _)| parameter),
            |key| key.strip_prefix("parameter."),
        );
        let rates = parts.load(
            states,
            settled_optimizer,
            |part, (tensors, metadata)| part.read_state(&tensors, &metadata),
            |part, read| {
                part.take_state(read);
                part.default_method().learning_rate()
            },
        )?;
        drop(parts);
        self.learning_rate = rates[0];
        Ok(())
    }

    /// Writes the state to a safetensors file atomically; in a pipeline over ranks, rank 0 writes the file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let (tensors, metadata) = self.state()?;
        self.parts.lock()?.ranks.on_first("save", || save::write(path, &tensors, &metadata))
    }

    /// Reads the state from a file written by [`Optimizer::save`].
    ///
    /// # Errors
    /// When the file cannot be read or is damaged, or as for [`Optimizer::load_state`]; nothing is changed
    /// then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let read = self.parts.lock()?.ranks.all_or_none("load", || save::read(path));
        let (tensors, metadata) = read?;
        self.load_state(&tensors, &metadata)
    }
}
