//! What the training loop asks of whoever runs the steps: whole models, or a pipeline; and
//! what those have in common.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use brimful::report::{self, Record};
use brimful::save::Metadata;
use brimful::{Layers, World, device};
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::TrainOptions;
use super::advice::FixedBytes;
use super::pipelined::Pipelined;
use super::whole_model::WholeModel;

/// Tensors with their names.
pub(super) type Named = Vec<(String, Tensor)>;

/// What is kept beside a model: what its optimizer knows, and the averages of its weights, if there
/// are any.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) optimizer: (Named, Metadata),
    pub(super) averages: Option<(Named, Metadata)>,
}

/// A model, its optimizer, and where they are.
pub(super) trait TrainingEngine: std::fmt::Debug {
    /// How far the next steps go.
    fn set_learning_rate(&mut self, rate: f64) -> brimful::Result<()>;

    /// Trains on mini-batches of inputs and targets, which make one step together.
    fn step(&mut self, batches: Vec<(Tensor, Tensor)>) -> brimful::Result<Record>;

    /// The loss of these samples and of all other ranks', and which of this rank's answers are right.
    fn test(&mut self, batch: (Tensor, Tensor)) -> brimful::Result<(f64, Tensor)>;

    /// Parameters and statistics under the layers' names: what is done to them is done to the model. In a
    /// pipeline over ranks, the first one gets copies of what others have.
    fn variables(&self) -> Result<Named>;

    /// What it keeps beside the model. Of several ranks, all take part.
    fn kept(&self) -> Result<Kept>;

    /// Takes over what another run has saved. Nothing is changed if it does not fit.
    fn load(&mut self, model: Named, kept: &Kept) -> Result<()>;

    /// What a step needs whatever the size of its micro-batches, where that is known.
    fn fixed_bytes(&self) -> Option<FixedBytes> {
        None
    }

    /// Where it trains, in words.
    fn place(&self) -> String;

    /// The devices whose peaks the steps tell, and where their memory ends.
    fn devices(&self) -> Result<Vec<report::Device>>;
}

/// The model's engine, as the options ask for it; `sample` gives a micro-batch to measure layers with.
pub(super) fn build(
    layers: Layers,
    world: &World,
    options: &TrainOptions,
    sample: impl FnOnce() -> brimful::Result<Tensor>,
) -> Result<Box<dyn TrainingEngine>> {
    let whole = options.ranks.whole_models(world).filter(|_| options.stages.stages.is_none());
    Ok(match whole {
        Some(each) => Box::new(WholeModel::new(layers, each, world, options)?),
        None => Box::new(Pipelined::new(layers, world, options, &sample()?)?),
    })
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

/// A store's variables with their names.
pub(super) fn named(store: &VarStore) -> Named {
    store.variables().into_iter().collect()
}

/// Gives variables the values of those that have the same names.
pub(super) fn put(variables: Named, values: Named) -> Result<()> {
    let _without = tch::no_grad_guard();
    let mut values: HashMap<String, Tensor> = values.into_iter().collect();
    for (name, mut variable) in variables {
        if let Some(value) = values.remove(&name) {
            variable.f_copy_(&value)?;
        }
    }
    Ok(())
}

/// The devices' names, each once.
pub(super) fn names(devices: &[Device]) -> String {
    let mut names: Vec<String> = devices.iter().map(|place| device::name(*place)).collect();
    names.dedup();
    names.join(", ")
}
