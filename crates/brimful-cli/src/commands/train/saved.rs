//! A training run in one safetensors file: the model under its own names, the optimizer's state
//! beside it, and what the run was told.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use brimful::save::{self, Metadata};
use tch::Tensor;

use super::running::Running;
use super::{TrainOptions, Trainer};

/// What the names of the optimizer's tensors and texts begin with.
const OPTIMIZER: &str = "optimizer.";
/// How many epochs are done, how many steps of the next one, and their part of its loss.
const EPOCH: &str = "epoch";
const STEP: &str = "step";
const LOSS: &str = "loss";
/// Of the first step.
const LEARNING_RATE: &str = "learning-rate";

/// Writes the run after its last finished step, whole or not at all; of several ranks, the first.
pub(super) fn store(path: &Path, trainer: &Trainer, options: &TrainOptions) -> Result<()> {
    let (tensors, texts) = trainer.engine.optimizer_state()?;
    let mut all = trainer.engine.variables()?;
    all.extend(tensors.into_iter().map(|(name, tensor)| (format!("{OPTIMIZER}{name}"), tensor)));
    let mut metadata = told(options);
    metadata.insert(EPOCH.into(), trainer.epoch.to_string());
    metadata.insert(STEP.into(), trainer.running.steps.to_string());
    // As it is read back, to the last bit.
    metadata.insert(LOSS.into(), format!("{:?}", trainer.running.loss));
    metadata.insert(LEARNING_RATE.into(), format!("{:?}", trainer.rate.first));
    metadata.extend(texts.into_iter().map(|(key, text)| (format!("{OPTIMIZER}{key}"), text)));
    let written = if trainer.is_first() { save::write(path, &all, &metadata) } else { Ok(()) };
    trainer.world.settle("save", written, Duration::ZERO)?;
    Ok(())
}

/// Takes a run over from its file. Nothing is changed if it does not fit.
pub(super) fn load(path: &Path, trainer: &mut Trainer, options: &TrainOptions) -> Result<()> {
    let (tensors, metadata) = save::read(path)?;
    for (key, now) in told(options) {
        let then = metadata.get(&key).map_or("nothing", String::as_str);
        ensure!(
            then == now,
            "it was made with --{key} {then}, but this run has {now}: say the same"
        );
    }
    let epoch = number(&metadata, EPOCH)?;
    let rate = options.learning_rate.map_or_else(|| number(&metadata, LEARNING_RATE), Ok)?;
    let running = Running::going_on(number(&metadata, STEP)?, number(&metadata, LOSS)?);
    ensure!(
        running.steps <= trainer.steps(),
        "it has {} steps of an epoch, but here one has {}: give it the data that it was made with",
        running.steps,
        trainer.steps()
    );
    let (state, model): (Vec<_>, Vec<_>) =
        tensors.into_iter().partition(|(name, _)| name.starts_with(OPTIMIZER));
    let strip = |name: String| name.strip_prefix(OPTIMIZER).map(str::to_owned);
    let state: Vec<(String, Tensor)> =
        state.into_iter().filter_map(|(name, tensor)| Some((strip(name)?, tensor))).collect();
    let texts: Metadata =
        metadata.into_iter().filter_map(|(key, text)| Some((strip(key)?, text))).collect();
    trainer.engine.load(model, &state, &texts)?;
    (trainer.epoch, trainer.running, trainer.rate.first) = (epoch, running, rate);
    Ok(())
}

fn number<N: FromStr>(metadata: &Metadata, key: &str) -> Result<N> {
    let number = metadata.get(key).and_then(|text| text.parse().ok());
    number.with_context(|| format!("it does not say its {key}: is it a file of --save?"))
}

/// What must be the same for a run to go on as it began.
fn told(options: &TrainOptions) -> Metadata {
    let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
    Metadata::from([
        ("model".to_owned(), options.model.to_string()),
        ("data".to_owned(), options.data.clone()),
        ("optimizer".to_owned(), name(&options.optimizer)),
        ("learning-rate-decay".to_owned(), options.learning_rate_decay.to_string()),
        ("batch-size".to_owned(), name(&options.batch_size)),
        ("dtype".to_owned(), options.dtype.to_string()),
        ("seed".to_owned(), options.seed.to_string()),
    ])
}
