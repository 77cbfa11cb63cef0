//! LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

use std::collections::BTreeMap;
use std::path::Path;

use brimful::internal::OpenedFile;
use brimful::nn::Lora;
use brimful::save::{self, Metadata};
use serde_json::{Map, Value, json};
use tch::Tensor;

use super::adapter_targets::lora_of;
use super::fields::Fields;
use super::taken_place::check_place;
use super::weights::{check_not_of_python, mistyped};
use super::{Config, Pretrained, PretrainedError, json as files, keys};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Pickled weights, written by older versions of PEFT.
const OF_PYTHON: &str = "adapter_model.bin";
/// Prefix that PEFT adds to the names of the model's variables.
const PREFIX: &str = "base_model.model.";

/// A folder with a LoRA adapter of a model.
#[derive(Debug)]
pub struct AdapterFolder {
    file: OpenedFile,
    lora: Lora,
    dropout: f64,
}

impl AdapterFolder {
    /// Opens a folder for this model, and reads everything but the weights.
    ///
    /// # Errors
    /// Fails if files are missing or invalid, if they ask for another method than LoRA of projections, or if the
    /// weights are not those of the adapter for this model: none may be missing, have another shape or be left over.
    pub fn open(folder: impl AsRef<Path>, model: &Config) -> Result<Self, PretrainedError> {
        let folder = folder.as_ref();
        let path = folder.join(CONFIG);
        let read = files::read(&path)?;
        let fields = Fields::new(&path, &read, keys::ADAPTER);
        let lora = lora_of(&fields, model)?;
        let dropout = fields.number_below("lora_dropout", 1.0, 0.0)?;
        check_not_of_python(folder, WEIGHTS, OF_PYTHON)?;
        let file = OpenedFile::open(folder.join(WEIGHTS))?;
        let differences = differences(&file, &model.layers().lora(&lora).variable_shapes()?);
        match differences.is_empty() {
            true => Ok(Self { file, lora, dropout }),
            false => {
                let folder = folder.display().to_string();
                Err(PretrainedError::Adapter { folder, differences })
            }
        }
    }

    /// Returns the adapter's configuration for the model's layers: see [`Layers::lora`](brimful::Layers::lora).
    pub fn lora(&self) -> &Lora {
        &self.lora
    }

    /// Returns the probability of `lora_dropout`. The layers here have no such dropout, because it was for the
    /// training of these weights.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Copies the weights into the variables of the same names, of the whole model or a part of it.
    ///
    /// # Errors
    /// Fails if the file can no longer be read, or the model differs from that of [`AdapterFolder::open`].
    pub fn load(&self, variables: &[(String, Tensor)]) -> Result<(), PretrainedError> {
        let mut wanted = variables.iter().filter(|(name, _)| Lora::is_adapter(name));
        wanted.try_for_each(|(name, variable)| {
            Ok(self.file.copy(&format!("{PREFIX}{name}"), variable)?)
        })
    }
}

/// Returns whether a folder holds an adapter.
pub fn is_adapter(folder: &Path) -> bool {
    folder.join(CONFIG).is_file()
}

/// Lists the differences between a file and the adapter's variables of a model, one per tensor.
fn differences(file: &OpenedFile, shapes: &BTreeMap<String, Vec<i64>>) -> Vec<String> {
    let mut left_over = file.names();
    let mut differences = Vec::new();
    for (name, wanted) in shapes.iter().filter(|(name, _)| Lora::is_adapter(name)) {
        let full = format!("{PREFIX}{name}");
        match file.shape(&full) {
            Some(found) if found == *wanted => differences.extend(mistyped(name, file.kind(&full))),
            Some(found) => differences.push(format!("{name} is {found:?}, not {wanted:?}")),
            None => differences.push(format!("{name} is missing")),
        }
        left_over.retain(|found| *found != full);
    }
    left_over.sort();
    differences.extend(left_over.iter().map(|name| format!("{name} belongs nowhere")));
    differences
}

impl Pretrained {
    /// Writes the LoRA weights and their description into a folder.
    pub(super) fn write_adapter(
        &self,
        new: &Path,
        lora: &Lora,
        variables: &[(String, Tensor)],
    ) -> Result<(), PretrainedError> {
        let adapters = variables.iter().filter(|(name, _)| Lora::is_adapter(name));
        let adapters: Vec<_> = adapters
            .map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor.shallow_clone()))
            .collect();
        let metadata = Metadata::from([("format".to_owned(), "pt".to_owned())]);
        save::write(new.join(WEIGHTS), &adapters, &metadata)?;
        files::write(&new.join(CONFIG), &self.adapter_config(lora))
    }

    fn adapter_config(&self, lora: &Lora) -> Value {
        let targets = match lora.targets.is_empty() {
            true => self.config.projections(),
            false => lora.targets.clone(),
        };
        let overrides = lora.overrides.iter();
        let named = overrides.flat_map(|own| own.targets.iter().map(move |target| (target, own)));
        let patterns = |value: fn(&Lora) -> Value| -> Map<String, Value> {
            named.clone().map(|(target, own)| (target.clone(), value(own))).collect()
        };
        json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.folder.display().to_string(),
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "rank_pattern": patterns(|own| own.rank.into()),
            "alpha_pattern": patterns(|own| own.alpha.into()),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": self.config.inputs_first(),
            "target_modules": targets,
            "inference_mode": true,
        })
    }
}

/// Refuses a folder for [`Pretrained::save_adapter`] that holds other files.
///
/// # Errors
/// Fails with the name of a file that would be lost.
pub fn check_adapter_place(folder: &Path) -> Result<(), PretrainedError> {
    check_place(folder, &[CONFIG, WEIGHTS])
}
