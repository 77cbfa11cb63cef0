//! A training run in one safetensors file: the model under its own names, the optimizer's state
//! beside it, and what the run was told.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use brimful::save::{self, Metadata};
use tch::Tensor;

use super::{Options, Trainer};

/// What the names of the optimizer's tensors and texts begin with.
const OPTIMIZER: &str = "optimizer.";
const EPOCH: &str = "epoch";

/// Writes the run after its last finished epoch, whole or not at all.
pub(super) fn store(path: &Path, trainer: &Trainer, options: &Options) -> Result<()> {
    let (tensors, texts) = trainer.optimizer.state();
    let mut all: Vec<(String, Tensor)> = trainer.store.variables().into_iter().collect();
    all.extend(tensors.into_iter().map(|(name, tensor)| (format!("{OPTIMIZER}{name}"), tensor)));
    let mut metadata = told(options);
    metadata.insert(EPOCH.into(), trainer.epoch.to_string());
    metadata.extend(texts.into_iter().map(|(key, text)| (format!("{OPTIMIZER}{key}"), text)));
    Ok(save::write(path, &all, &metadata)?)
}

/// Takes a run over from its file. Nothing is changed if it does not fit.
pub(super) fn load(path: &Path, trainer: &mut Trainer, options: &Options) -> Result<()> {
    let (tensors, metadata) = save::read(path)?;
    for (key, now) in told(options) {
        let then = metadata.get(&key).map_or("nothing", String::as_str);
        ensure!(
            then == now,
            "it was made with --{key} {then}, but this run has {now}: say the same"
        );
    }
    let epoch = metadata.get(EPOCH).and_then(|text| text.parse().ok());
    let epoch = epoch.context("it does not say how many epochs are done")?;
    let (state, model): (Vec<_>, Vec<_>) =
        tensors.into_iter().partition(|(name, _)| name.starts_with(OPTIMIZER));
    check_model(trainer, &model)?;
    let strip = |name: String| name.strip_prefix(OPTIMIZER).map(str::to_owned);
    let state: Vec<(String, Tensor)> =
        state.into_iter().filter_map(|(name, tensor)| Some((strip(name)?, tensor))).collect();
    let texts: Metadata =
        metadata.into_iter().filter_map(|(key, text)| Some((strip(key)?, text))).collect();
    trainer.optimizer.load_state(&state, &texts)?;
    copy_model(trainer, &model)?;
    trainer.epoch = epoch;
    Ok(())
}

/// What must be the same for a run to go on as it began.
fn told(options: &Options) -> Metadata {
    let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
    Metadata::from([
        ("model".to_owned(), name(&options.model)),
        ("data".to_owned(), options.data.clone()),
        ("optimizer".to_owned(), name(&options.optimizer)),
        ("batch-size".to_owned(), name(&options.batch_size)),
        ("dtype".to_owned(), name(&options.dtype)),
        ("seed".to_owned(), options.seed.to_string()),
    ])
}

fn check_model(trainer: &Trainer, model: &[(String, Tensor)]) -> Result<()> {
    let variables = trainer.store.variables();
    ensure!(
        variables.len() == model.len(),
        "it has {} tensors of a model, but this one has {}",
        model.len(),
        variables.len()
    );
    for (name, tensor) in model {
        let mine = variables.get(name).with_context(|| format!("the model has no {name}"))?;
        ensure!(
            mine.size() == tensor.size(),
            "{name} has the shape {:?} in it, but {:?} in the model",
            tensor.size(),
            mine.size()
        );
    }
    Ok(())
}

fn copy_model(trainer: &Trainer, model: &[(String, Tensor)]) -> Result<()> {
    let _without = tch::no_grad_guard();
    let mut variables = trainer.store.variables();
    for (name, tensor) in model {
        if let Some(variable) = variables.get_mut(name) {
            variable.f_copy_(tensor)?;
        }
    }
    Ok(())
}
