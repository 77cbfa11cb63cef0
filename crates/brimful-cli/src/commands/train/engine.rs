//! What the training loop asks of whoever runs the steps: whole models, or a pipeline; and
//! what those have in common.

use anyhow::{Context, Result, ensure};
use brimful::report::{self, Record};
use brimful::save::Metadata;
use brimful::{Layers, World, device};
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::TrainOptions;
use super::pipelined::Pipelined;
use super::whole_model::WholeModel;

/// Tensors with their names.
pub(super) type Named = Vec<(String, Tensor)>;

/// A model, its optimizer, and where they are.
pub(super) trait TrainingEngine: std::fmt::Debug {
    /// How far the next steps go.
    fn set_learning_rate(&mut self, rate: f64) -> brimful::Result<()>;

    /// Trains on mini-batches of inputs and targets, which make one step together.
    fn step(&mut self, batches: Vec<(Tensor, Tensor)>) -> brimful::Result<Record>;

    /// The loss of these samples and of all other ranks', and which of this rank's answers are right.
    fn test(&mut self, batch: (Tensor, Tensor)) -> brimful::Result<(f64, Tensor)>;

    /// Parameters and statistics under the layers' names.
    fn variables(&self) -> Result<Named>;

    fn optimizer_state(&self) -> Result<(Named, Metadata)>;

    /// Takes over what another run has saved. Nothing is changed if it does not fit.
    fn load(&mut self, model: Named, state: &Named, texts: &Metadata) -> Result<()>;

    /// Gives variables of these names the values of these tensors, which have their shapes.
    fn put(&mut self, model: Named) -> Result<()>;

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

/// Gives a store's variables the values of those that have the same names.
pub(super) fn put(store: &VarStore, model: Named) -> Result<()> {
    let _without = tch::no_grad_guard();
    let mut variables = store.variables();
    for (name, tensor) in model {
        if let Some(variable) = variables.get_mut(&name) {
            variable.f_copy_(&tensor)?;
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
