//! A training run in one safetensors file: the model under its own names, the optimizer's state
//! beside it, and what the run was told.

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use brimful::save::{self, Metadata, WrittenFile};

use super::engine::Kept;
use super::running::Running;
use super::tested::TestsSoFar;
use super::{TrainOptions, Trainer};
use crate::fine_tune::FineTune;
use crate::named::Named;
use crate::saved_weights::{AVERAGES, CLASSES, OPTIMIZER, model_alone, taken};

/// How many epochs are done, how many steps of the next one, and their part of its loss.
const EPOCH: &str = "epoch";
const STEP: &str = "step";
const LOSS: &str = "loss";
/// How many samples an epoch has.
const SAMPLES: &str = "samples";
/// Of the first step.
const LEARNING_RATE: &str = "learning-rate";

/// A run as it is after a step: the tensors are its own, which the next step changes.
#[derive(Debug)]
pub(super) struct SavedRun {
    tensors: Named,
    metadata: Metadata,
    /// What knows the form of a folder, where the model alone is saved to one.
    folder: Option<Arc<FineTune>>,
}

impl SavedRun {
    /// The run after its last finished step. Of several ranks, all take part.
    pub(super) fn of(trainer: &Trainer) -> Result<Self> {
        match (&trainer.folder, trainer.options.saved_folder()) {
            (Some(folder), Some(_)) => Self::of_model(trainer, folder),
            _ => Self::of_run(trainer),
        }
    }

    /// The model alone: its averages, where there are any.
    fn of_model(trainer: &Trainer, folder: &Arc<FineTune>) -> Result<Self> {
        let mut tensors = trainer.engine.variables()?;
        tensors.retain(|(name, _)| folder.writes(name));
        if trainer.options.recipe.ema.is_some() {
            let averages = trainer.engine.kept()?.averages.map(|(averages, _)| averages);
            let mut averages: HashMap<_, _> = averages.unwrap_or_default().into_iter().collect();
            for (name, tensor) in &mut tensors {
                *tensor = averages.remove(name).unwrap_or_else(|| tensor.shallow_clone());
            }
        }
        let folder = Some(Arc::clone(folder));
        Ok(Self { tensors, metadata: Metadata::new(), folder })
    }

    fn of_run(trainer: &Trainer) -> Result<Self> {
        let Kept { optimizer, averages } = trainer.engine.kept()?;
        let mut tensors = trainer.engine.variables()?;
        let mut metadata = told(&trainer.options);
        let kept = [(OPTIMIZER, Some(optimizer)), (AVERAGES, averages)];
        for (prefix, (state, texts)) in kept.into_iter().filter_map(|(p, kept)| Some((p, kept?))) {
            tensors.extend(state.into_iter().map(|(name, t)| (format!("{prefix}{name}"), t)));
            metadata.extend(texts.into_iter().map(|(key, text)| (format!("{prefix}{key}"), text)));
        }
        metadata.insert(EPOCH.into(), trainer.epoch.to_string());
        metadata.insert(STEP.into(), trainer.running.steps.to_string());
        metadata.insert(SAMPLES.into(), trainer.dataset.train.len().to_string());
        // As it is read back, to the last bit.
        metadata.insert(LOSS.into(), format!("{:?}", trainer.running.loss));
        metadata.insert(LEARNING_RATE.into(), format!("{:?}", trainer.rate));
        metadata.extend(class_names(trainer)?.map(|names| (CLASSES.into(), names)));
        metadata.extend(trainer.tests.told());
        Ok(Self { tensors, metadata, folder: None })
    }

    /// Writes it beside its place; a folder at once to its place, of which there is nothing left to do.
    pub(super) fn write(&self, path: &Path) -> brimful::Result<Option<WrittenFile>> {
        match &self.folder {
            Some(folder) => folder.save(path, &self.tensors).map(|()| None),
            None => save::write_beside(path, &self.tensors, &self.metadata).map(Some),
        }
    }
}

/// Takes a run over from its file. Nothing is changed if it does not fit.
pub(super) fn load(path: &Path, trainer: &mut Trainer) -> Result<()> {
    let (tensors, metadata) = save::read(path)?;
    check_told(&metadata, &trainer.options)?;
    let epoch = number(&metadata, EPOCH)?;
    let recipe = &trainer.options.recipe;
    let rate = recipe.learning_rate.map_or_else(|| number(&metadata, LEARNING_RATE), Ok)?;
    let running = Running::going_on(number(&metadata, STEP)?, number(&metadata, LOSS)?);
    ensure!(
        running.steps <= trainer.steps(),
        "it has {} steps of an epoch, but here one has {}: give it the data that it was made with",
        running.steps,
        trainer.steps()
    );
    // Between epochs data may grow; within one, samples would come twice or not at all.
    let (then, now) = (metadata.get(SAMPLES), trainer.dataset.train.len().to_string());
    ensure!(
        running.steps == 0 || then.is_none_or(|then| *then == now),
        "it stopped within an epoch of {} samples, but here one has {now}: give it the data that it was made \
         with",
        then.map_or("", String::as_str)
    );
    let classes = class_names(trainer)?;
    ensure!(
        metadata.get(CLASSES) == classes.as_ref(),
        "its classes are {}, but those of the data are {}: give it the data that it was made with",
        metadata.get(CLASSES).map_or("without names", String::as_str),
        classes.as_deref().unwrap_or("without names"),
    );
    let tests = TestsSoFar::read(&metadata);
    let averages = recipe.ema.map(|_| kept(AVERAGES, &tensors, &metadata));
    let beside = Kept { optimizer: kept(OPTIMIZER, &tensors, &metadata), averages };
    trainer.engine.load(model_alone(tensors), &beside)?;
    (trainer.epoch, trainer.running, trainer.tests) = (epoch, running, tests);
    trainer.rate = rate;
    Ok(())
}

/// What the classes of its data are called, as a file tells it.
fn class_names(trainer: &Trainer) -> Result<Option<String>> {
    let names = &trainer.dataset.class_names;
    Ok((!names.is_empty()).then(|| serde_json::to_string(names)).transpose()?)
}

/// Tensors and texts whose names begin so, without that.
fn kept(prefix: &str, tensors: &Named, metadata: &Metadata) -> (Named, Metadata) {
    let text = |(key, text): (&String, &String)| {
        Some((key.strip_prefix(prefix)?.to_owned(), text.clone()))
    };
    (taken(prefix, tensors), metadata.iter().filter_map(text).collect())
}

/// A run goes on as it began: with the same words.
fn check_told(metadata: &Metadata, options: &TrainOptions) -> Result<()> {
    for (flag, now) in flags(options) {
        let then = metadata.get(flag).map(|text| {
            // As a mini-batch's size was once written.
            text.trim_start_matches("samples(").trim_end_matches(')')
        });
        let now = now.as_deref();
        ensure!(
            then == now,
            "it was made with {}, but this run has {}: say the same",
            shown(flag, then),
            shown(flag, now)
        );
    }
    Ok(())
}

/// A flag as it was told, or that it was not.
pub(super) fn shown(flag: &str, text: Option<&str>) -> String {
    match text {
        Some(text) => format!("--{flag} {text}"),
        None => format!("no --{flag}"),
    }
}

fn number<N: FromStr>(metadata: &Metadata, key: &str) -> Result<N> {
    let number = metadata.get(key).and_then(|text| text.parse().ok());
    number.with_context(|| format!("it does not say its {key}: is it a file of --save?"))
}

/// What must be the same for a run to go on as it began, of what it was told.
pub(super) fn told(options: &TrainOptions) -> Metadata {
    let told = flags(options).into_iter();
    told.filter_map(|(flag, text)| Some((flag.to_owned(), text?))).collect()
}

/// All such flags, in the order in which they are compared; `None` for one that may be left out and was.
fn flags(options: &TrainOptions) -> [(&'static str, Option<String>); 16] {
    fn said(value: Option<impl ToString>) -> Option<String> {
        value.map(|value| value.to_string())
    }
    let recipe = &options.recipe;
    [
        ("accumulate", said((recipe.accumulate != 1).then_some(recipe.accumulate))),
        ("batch-size", said(Some(options.batch_size()))),
        ("clip-norm", said(recipe.clip_norm)),
        ("data", said(Some(&options.data))),
        ("dtype", said(Some(options.dtype()))),
        ("ema", said(recipe.ema)),
        ("image", said(options.image)),
        ("learning-rate-decay", said(Some(recipe.learning_rate_decay))),
        ("lora", said(options.fine_tune.lora.as_ref())),
        ("model", said(Some(&options.model))),
        ("momentum", said(recipe.momentum)),
        ("optimizer", said(Some(recipe.optimizer))),
        ("seed", said(Some(options.seed))),
        ("sequence", said(options.sequence)),
        ("warmup", said(recipe.warmup.filter(|steps| *steps != 0))),
        ("weight-decay", said(recipe.weight_decay)),
    ]
}
