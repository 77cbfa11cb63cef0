//! What the training loop asks of whoever runs the steps: one device, or a pipeline.

use anyhow::{Context, Result, ensure};
use brimful::report::{Device, Record};
use brimful::save::Metadata;
use tch::Tensor;

/// Tensors with their names.
pub(super) type Named = Vec<(String, Tensor)>;

/// A model, its optimizer, and where they are.
pub(super) trait Engine: std::fmt::Debug {
    /// Trains on one mini-batch of inputs and targets.
    fn step(&mut self, batch: (Tensor, Tensor)) -> brimful::Result<Record>;

    /// The loss of these samples, and which answers are right.
    fn test(&mut self, batch: (Tensor, Tensor)) -> brimful::Result<(f64, Tensor)>;

    /// Parameters and statistics under the layers' names.
    fn variables(&self) -> Result<Named>;

    fn optimizer_state(&self) -> Result<(Named, Metadata)>;

    /// Takes over what another run has saved. Nothing is changed if it does not fit.
    fn load(&mut self, model: Named, state: &Named, texts: &Metadata) -> Result<()>;

    /// Where it trains, in words.
    fn place(&self) -> String;

    /// The devices whose peaks the steps tell, and where their memory ends.
    fn devices(&self) -> Result<Vec<Device>>;
}

/// The saved tensors must be the model's, all of them.
pub(super) fn check_model(here: &Named, saved: &Named) -> Result<()> {
    ensure!(
        here.len() == saved.len(),
        "it has {} tensors of a model, but this one has {}",
        saved.len(),
        here.len()
    );
    for (name, tensor) in saved {
        let mine = here.iter().find(|(mine, _)| mine == name);
        let (_, mine) = mine.with_context(|| format!("the model has no {name}"))?;
        ensure!(
            mine.size() == tensor.size(),
            "{name} has the shape {:?} in it, but {:?} in the model",
            tensor.size(),
            mine.size()
        );
    }
    Ok(())
}
