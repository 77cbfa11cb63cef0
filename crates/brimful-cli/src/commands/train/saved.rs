//! A training run in one safetensors file: the model's tensors under their own names, the optimizer's state, and
//! the run's options. In a model's folder, the file leaves out tensors that a resumed run loads from the folder's
//! other files, or from the pretrained model.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use brimful::save::{self, Metadata, WrittenFile};
use brimful_models::pretrained::{RUN_FILE, is_adapter};

use super::Trainer;
use super::engine::Kept;
use super::moved::{self, Content};
use super::run_state::{RunState, Running};
use crate::config::run_flags;
use crate::exit::wrong_use;
use crate::files::folder_of;
use crate::model::FineTune;
use crate::named::{self, Comparison, Named};
use crate::progress;
use crate::saved_weights::{
    AVERAGES, CLASSES, EPOCH, OPTIMIZER, PIXELS, SavedWeights, model_alone, run_file, taken,
};

/// Metadata key of the number of samples in an epoch.
const SAMPLES: &str = "samples";

/// A run as it is after a step. It shares the trainer's tensors, so it must be written before the next step
/// changes them.
#[derive(Debug)]
pub(super) struct SavedRun {
    tensors: Named,
    metadata: Metadata,
    /// Model to write, if the run is saved to a folder.
    model: Option<SavedModel>,
}

/// A model to be written into a folder.
#[derive(Debug)]
struct SavedModel {
    tensors: Named,
    folder: Arc<FineTune>,
    /// True if the run is not over, so that the run's file is written beside the model.
    goes_on: bool,
}

impl SavedRun {
    /// Takes the run after its last finished step. Collective: every rank takes part.
    pub(super) fn of(trainer: &Trainer) -> Result<Self> {
        Self::with(trainer, !trainer.is_over())
    }

    /// Takes the run as the best so far. For a folder, takes only the model.
    pub(super) fn of_best(trainer: &Trainer) -> Result<Self> {
        Self::with(trainer, false)
    }

    fn with(trainer: &Trainer, goes_on: bool) -> Result<Self> {
        let (Some(folder), Some(_)) = (&trainer.folder, trainer.options.saved_folder()) else {
            return Self::of_run(trainer, |_| true);
        };
        let model = SavedModel {
            tensors: Self::of_model(trainer, folder)?,
            folder: Arc::clone(folder),
            goes_on,
        };
        let has_averages = trainer.options.recipe.ema.is_some();
        let run = match goes_on {
            // Leaves out tensors that a resumed run loads from the folder's other files, or from the pretrained
            // model.
            true => Self::of_run(trainer, |name| folder.lacks(name, has_averages))?,
            false => Self { tensors: Vec::new(), metadata: Metadata::new(), model: None },
        };
        Ok(Self { model: Some(model), ..run })
    }

    /// Takes only the model. If there are averages, takes them in place of the weights.
    fn of_model(trainer: &Trainer, folder: &FineTune) -> Result<Named> {
        let mut tensors = trainer.engine.variables()?;
        tensors.retain(|(name, _)| folder.writes(name));
        if trainer.options.recipe.ema.is_some() {
            let averages = trainer.engine.kept()?.averages.map(|(averages, _)| averages);
            let mut averages: HashMap<_, _> = averages.unwrap_or_default().into_iter().collect();
            for (name, tensor) in &mut tensors {
                *tensor = averages.remove(name).unwrap_or_else(|| tensor.shallow_clone());
            }
        }
        Ok(tensors)
    }

    /// Takes the whole run, but only the wanted tensors of the model.
    fn of_run(trainer: &Trainer, is_wanted: impl Fn(&str) -> bool) -> Result<Self> {
        let Kept { optimizer, averages } = trainer.engine.kept()?;
        let mut tensors = trainer.engine.variables()?;
        tensors.retain(|(name, _)| is_wanted(name));
        let mut metadata = run_flags::shared_metadata(&trainer.options);
        let kept = [(OPTIMIZER, Some(optimizer)), (AVERAGES, averages)];
        for (prefix, (state, texts)) in kept.into_iter().filter_map(|(p, kept)| Some((p, kept?))) {
            tensors.extend(state.into_iter().map(|(name, t)| (format!("{prefix}{name}"), t)));
            metadata.extend(texts.into_iter().map(|(key, text)| (format!("{prefix}{key}"), text)));
        }
        metadata.insert(SAMPLES.into(), trainer.dataset.train.len().to_string());
        metadata.extend(class_names(trainer)?.map(|names| (CLASSES.into(), names)));
        metadata.extend(trainer.dataset.pixels.map(|scale| (PIXELS.into(), scale.to_string())));
        metadata.extend(trainer.state.told());
        metadata.extend(trainer.contents.clone());
        trainer.options.given.tell(&mut metadata);
        Ok(Self { tensors, metadata, model: None })
    }

    /// Writes a file beside its place, and returns it so that the caller renames it. Writes a folder directly into
    /// place, and returns none.
    pub(super) fn write(&self, path: &Path) -> brimful::Result<Option<WrittenFile>> {
        // This run has locked the place, so a left-over file is from a run that was killed.
        save::remove_left_over(path);
        let run = |path: &Path| save::write(path, &self.tensors, &self.metadata);
        match &self.model {
            Some(SavedModel { tensors, folder, goes_on }) => folder
                .save(path, tensors, |new| if *goes_on { run(&run_file(new)) } else { Ok(()) })
                .map(|()| None),
            None => save::write_beside(path, &self.tensors, &self.metadata).map(Some),
        }
    }
}

/// Loads a run from its file or folder. Fails if the run does not fit the model, the options or the data.
pub(super) fn load(path: &Path, trainer: &mut Trainer) -> Result<()> {
    let file = run_file(path);
    ensure!(file == path || file.exists(), "{}", without_run(path));
    let (tensors, metadata) = save::read(&file)?;
    ensure!(metadata.contains_key(EPOCH), "{}", weights_alone(path));
    check_told(&metadata, trainer)?;
    let recipe = &trainer.options.recipe;
    let state = RunState::read(&metadata, recipe.learning_rate)?;
    check_data(&metadata, &state.running, trainer)?;
    let averages = recipe.ema.map(|_| kept(AVERAGES, &tensors, &metadata));
    let beside = Kept { optimizer: kept(OPTIMIZER, &tensors, &metadata), averages };
    let mut model = model_alone(tensors);
    if file != path {
        add_unsaved(path, &mut model, trainer)?;
    }
    trainer.engine.load(model, &beside)?;
    trainer.state = state;
    Ok(())
}

/// Says how to use a folder that has no run.
fn without_run(folder: &Path) -> String {
    let shown = folder.display();
    if is_adapter(folder) {
        return format!(
            "its run is done, and it holds the adapter alone: train that on by --adapter {shown} with --model"
        );
    }
    if folder.join("config.json").is_file() {
        return format!(
            "its run is done, and it holds the model alone: train that on by --model {shown} and another --save"
        );
    }
    format!(
        "it is a folder without {RUN_FILE}: name a file of --save, or a folder of --save whose run is not done"
    )
}

/// Says how to use a file that has weights but no run.
fn weights_alone(file: &Path) -> String {
    let folder = folder_of(file);
    let shown = folder.display();
    if run_file(folder).is_file() {
        return format!("it holds weights, and the run is beside it: give --resume {shown}");
    }
    match folder.join("config.json").is_file() {
        true => format!("it holds weights and no run: train them by --model {shown}"),
        false => {
            format!("it holds weights and no run: begin with them by --init {}", file.display())
        }
    }
}

/// Checks that the run can continue with the data. If the run stopped within an epoch, the data must not have
/// changed.
fn check_data(metadata: &Metadata, running: &Running, trainer: &Trainer) -> Result<()> {
    ensure!(
        running.steps <= trainer.steps(),
        "it has {} steps of an epoch, but here one has {}: give the data of the first run",
        running.steps,
        trainer.steps()
    );
    // Data may grow between epochs. If data grew within an epoch, samples would be repeated or skipped.
    let (then, now) = (metadata.get(SAMPLES), trainer.dataset.train.len().to_string());
    ensure!(
        running.steps == 0 || then.is_none_or(|then| *then == now),
        "it stopped within an epoch of {} samples, but here one has {now}: give the data of the first run",
        then.map_or("", String::as_str)
    );
    let data = &trainer.options.data;
    if moved::compare("data", metadata, &trainer.contents, false) == Content::Other
        && metadata.get("data") == Some(data)
    {
        ensure!(
            running.steps == 0,
            "it stopped within an epoch, and --data {data} has changed since: give it the data that it was made \
             with"
        );
        progress::say(&format!(
            "brimful: --data {data} has changed since the run was saved; its next epoch is of the data as they are now"
        ));
    }
    let classes = class_names(trainer)?;
    ensure!(
        metadata.get(CLASSES) == classes.as_ref(),
        "its classes are {}, but those of the data are {}: give the data of the first run",
        metadata.get(CLASSES).map_or("without names", String::as_str),
        classes.as_deref().unwrap_or("without names"),
    );
    Ok(())
}

/// Returns the names of the classes of the trainer's data, as the file stores them.
fn class_names(trainer: &Trainer) -> Result<Option<String>> {
    let names = &trainer.dataset.class_names;
    Ok((!names.is_empty()).then(|| serde_json::to_string(names)).transpose()?)
}

/// Returns the tensors and metadata whose names have this prefix, and removes the prefix.
fn kept(prefix: &str, tensors: &Named, metadata: &Metadata) -> (Named, Metadata) {
    let text = |(key, text): (&String, &String)| {
        Some((key.strip_prefix(prefix)?.to_owned(), text.clone()))
    };
    (taken(prefix, tensors), metadata.iter().filter_map(text).collect())
}

/// Adds the model's tensors that the run's file in a folder lacks. They are in the folder's other files, or
/// unchanged from the pretrained model.
fn add_unsaved(path: &Path, model: &mut Named, trainer: &Trainer) -> Result<()> {
    let Some(folder) = &trainer.folder else {
        bail!("it is the folder of a fine-tuned model: give --model FOLDER")
    };
    let variables = trainer.engine.variables()?;
    folder.load_saved(path, &variables)?;
    let saved: HashSet<String> = model.iter().map(|(name, _)| name.clone()).collect();
    model.extend(variables.into_iter().filter(|(name, _)| !saved.contains(name)));
    Ok(())
}

/// Checks that a run resumes with the options and the model that it began with. A path may change if the content
/// is the same.
fn check_told(metadata: &Metadata, trainer: &Trainer) -> Result<()> {
    let (mut then_told, mut now_told) = (Vec::new(), Vec::new());
    let (mut again, mut out) = (Vec::new(), Vec::new());
    for (flag, now) in run_flags::shared(&trainer.options) {
        let then = metadata.get(flag).map(|text| {
            // Older files have a batch size as `samples(N)`.
            text.trim_start_matches("samples(").trim_end_matches(')')
        });
        let is_moved = then != now.as_deref();
        match moved::compare(flag, metadata, &trainer.contents, is_moved) {
            Content::Other | Content::Unknown if is_moved => {
                then_told.push(run_flags::shown(flag, then));
                now_told.push(run_flags::shown(flag, now.as_deref()));
                match then {
                    Some(text) => again.push(format!("--{flag} {text}")),
                    None => out.push(format!("--{flag}")),
                }
            }
            // The data may grow between epochs, which `check_data` checks.
            Content::Other if flag != "data" => bail!(
                "{} holds other weights or another description now than it was made with: give it those",
                run_flags::shown(flag, then)
            ),
            _ => {}
        }
    }
    ensure!(
        then_told.is_empty(),
        "it was made with {}, but this run has {}: {}",
        then_told.join(", "),
        now_told.join(", "),
        remedy(&again, &out)
    );
    Ok(())
}

/// Says which flags to pass again, and which to leave out.
fn remedy(again: &[String], out: &[String]) -> String {
    let (again, out) = (again.join(" "), out.join(" "));
    match (&*again, &*out) {
        (again, "") => format!("pass {again} again"),
        ("", out) => format!("leave {out} out"),
        (again, out) => format!("pass {again} again and leave {out} out"),
    }
}

/// Loads the file's weights into the model. If `partial` is true, loads only the weights that fit by name and
/// shape.
pub(super) fn initialize(path: &Path, partial: bool, trainer: &mut Trainer) -> Result<()> {
    let weights = SavedWeights::read(path)
        .map(SavedWeights::into_tensors)
        .with_context(|| format!("cannot load the weights of {}", path.display()))?;
    let variables = trainer.engine.variables()?;
    let compared = Comparison::new(&variables, weights);
    let count = compared.fitting.len();
    let differences = compared.differences();
    let shown = path.display();
    let refused = differences.as_ref().and_then(|differences| match (partial, count) {
        (false, _) => Some(format!("{differences}; --init-partial loads the others")),
        (true, 0) => Some(format!("none of its weights fit the model: {differences}")),
        (true, _) => None,
    });
    // In a pipeline over ranks, only the first rank knows all variables.
    let told = trainer.world.share("init", &refused.filter(|_| trainer.is_first()))?;
    if let Some(reason) = told.into_iter().flatten().next() {
        return Err(wrong_use(format!("--init {shown}: {reason}")));
    }
    if let Some(differences) = differences.filter(|_| trainer.is_first()) {
        progress::say(&format!("brimful: {count} weights of {shown} are loaded; {differences}"));
    }
    named::put(variables, compared.fitting)
}
