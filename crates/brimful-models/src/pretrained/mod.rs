//! Folders of pretrained models, as Hugging Face's libraries read and write them: config.json, model.safetensors or
//! shards with their index, and the tokenizer's files, which are copied unchanged.
//!
//! ```no_run
//! use brimful::Pipeline;
//! use brimful_models::pretrained::Pretrained;
//! use tch::Device;
//!
//! let folder = Pretrained::open("llama")?;
//! let layers = folder.config().layers();
//! let pipe = Pipeline::builder(layers).devices([Device::Cpu, Device::Cpu]).build()?;
//! folder.load(&pipe.variables()?)?;       // each weight straight to the stage that owns it
//! // … training …
//! folder.save("llama-tuned", &pipe.variables()?)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Supported are `gpt2`, `llama`, `mistral` and `qwen2`. Weights are memory-mapped, and copied one by one into the
//! variables that own them, on any device and in any dtype. So a device never holds more than its own variables, and
//! the host's memory never holds the model twice.

mod adapter;
mod adapter_targets;
mod config;
mod error;
mod fields;
mod json;
mod keys;
mod taken_place;
mod weights;

use std::fs;
use std::path::{Path, PathBuf};

use brimful::nn::Lora;
use brimful::save::{self, Metadata};
use serde_json::{Map, Value};
use tch::{Kind, Tensor};

pub use adapter::{AdapterFolder, check_adapter_place, is_adapter};
pub use config::Config;
pub use error::PretrainedError;
use fields::Fields;
pub use taken_place::RUN_FILE;
use taken_place::check_place;
use weights::{WEIGHTS, Weights};

/// File that describes the model.
const CONFIG: &str = "config.json";
/// Field that says whether the head shares the token embedding.
const TIED: &str = "tie_word_embeddings";
/// Files of tokenizer and generation, which are copied with the weights.
const TOKENIZER_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
];

/// Part of a model that [`Pretrained::save_with`] writes to a folder.
#[derive(Debug, Clone, Copy)]
pub enum SavedPart<'a> {
    /// The model.
    Model,
    /// The model, with the LoRA weights merged into its own.
    Merged(&'a Lora),
    /// The LoRA weights alone.
    Adapter(&'a Lora),
}

/// A folder with a pretrained model.
#[derive(Debug)]
pub struct Pretrained {
    folder: PathBuf,
    config: Config,
    /// Content of config.json, including unknown keys, which are written back.
    told: Map<String, Value>,
    /// None for a model that starts with random weights.
    weights: Option<Weights>,
}

impl Pretrained {
    /// Opens a folder, and reads everything but the weights.
    ///
    /// # Errors
    /// Fails if files are missing or invalid, the model's type is not supported, or the weights differ from those of
    /// the model that config.json describes.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, PretrainedError> {
        let mut described = Self::described(folder.as_ref())?;
        let config = &mut described.config;
        let mut weights = Weights::open(&described.folder, config.prefix())?;
        weights.check_blocks(config.blocks())?;
        // As in transformers, a head and an embedding that differ in the files stay separate, whatever config.json
        // says.
        if config.is_tied() && !weights.tie(config.token_table())? {
            config.untie();
            described.told.insert(TIED.to_owned(), false.into());
        }
        weights.check(&config.layers().variable_shapes()?, config.passed_over())?;
        Ok(Self { weights: Some(weights), ..described })
    }

    /// Opens the model of a folder, but not the weights that the folder may have. [`Pretrained::load`] then
    /// changes nothing, so that a training starts with random weights.
    ///
    /// # Errors
    /// Fails if config.json is missing or invalid, or the model's type is not supported.
    pub fn without_weights(folder: impl AsRef<Path>) -> Result<Self, PretrainedError> {
        let described = Self::described(folder.as_ref())?;
        let path = described.folder.join(CONFIG);
        let fields = Fields::new(&path, &described.told, &[]);
        described.config.check_beginning(&fields)?;
        Ok(described)
    }

    /// Reads config.json only.
    fn described(folder: &Path) -> Result<Self, PretrainedError> {
        let path = folder.join(CONFIG);
        let told = json::read(&path)?;
        let config = Config::of(Fields::new(&path, &told, &[]))?;
        Ok(Self { folder: folder.to_owned(), config, told, weights: None })
    }

    /// Returns the folder's path.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the dtype of the first weight by name in the folder's files; `None` without weights, as after
    /// [`Pretrained::without_weights`].
    pub fn stored_kind(&self) -> Option<Kind> {
        self.weights.as_ref().and_then(Weights::kind)
    }

    /// Returns the tokens that end a text, if the model has any.
    pub fn end_tokens(&self) -> Vec<i64> {
        match self.told.get("eos_token_id") {
            Some(Value::Array(several)) => several.iter().filter_map(Value::as_i64).collect(),
            one => one.and_then(Value::as_i64).into_iter().collect(),
        }
    }

    /// Copies the weights into the variables of the same names, of the whole model or a part of it, as returned by
    /// [`Pipeline::variables`](brimful::Pipeline::variables) or a `VarStore`. LoRA weights stay unchanged.
    ///
    /// # Errors
    /// Fails if a file can no longer be read, or memory runs out.
    pub fn load(&self, variables: &[(String, Tensor)]) -> Result<(), PretrainedError> {
        let Some(weights) = &self.weights else { return Ok(()) };
        let mut own = variables.iter().filter(|(name, _)| !Lora::is_adapter(name));
        own.try_for_each(|(name, variable)| weights.copy(name, variable))
    }

    /// Writes variables of this model to a folder that `transformers` loads: config.json, weights (those of a tied
    /// head once), and the tokenizer's files. The write is atomic.
    ///
    /// # Errors
    /// Fails if the folder holds something else, or the file system refuses. The folder is then unchanged.
    pub fn save(
        &self,
        folder: impl AsRef<Path>,
        variables: &[(String, Tensor)],
    ) -> Result<(), PretrainedError> {
        self.save_with(folder, SavedPart::Model, variables, |_| Ok(()))
    }

    /// Writes variables with LoRA as [`Pretrained::save`] does. Merges the LoRA weights into each weight as the
    /// weight is written.
    ///
    /// # Errors
    /// As [`Pretrained::save`], and when memory runs out.
    pub fn save_merged(
        &self,
        folder: impl AsRef<Path>,
        lora: &Lora,
        variables: &[(String, Tensor)],
    ) -> Result<(), PretrainedError> {
        self.save_with(folder, SavedPart::Merged(lora), variables, |_| Ok(()))
    }

    /// Writes the LoRA weights alone, as [`Pretrained::save`] does, to a folder that PEFT loads with this model.
    ///
    /// # Errors
    /// As [`Pretrained::save`].
    pub fn save_adapter(
        &self,
        folder: impl AsRef<Path>,
        lora: &Lora,
        variables: &[(String, Tensor)],
    ) -> Result<(), PretrainedError> {
        self.save_with(folder, SavedPart::Adapter(lora), variables, |_| Ok(()))
    }

    /// Writes a part of a model to a folder, together with the files that `add` writes into the new folder. The write
    /// is atomic.
    ///
    /// # Errors
    /// As [`Pretrained::save`], and those of `add`.
    pub fn save_with(
        &self,
        folder: impl AsRef<Path>,
        part: SavedPart<'_>,
        variables: &[(String, Tensor)],
        add: impl FnOnce(&Path) -> brimful::Result<()>,
    ) -> Result<(), PretrainedError> {
        let folder = folder.as_ref();
        match part {
            SavedPart::Adapter(_) => check_adapter_place(folder)?,
            SavedPart::Model | SavedPart::Merged(_) => check_model_place(folder)?,
        }
        save::replace_folder(folder, |new| {
            match part {
                SavedPart::Model => {
                    self.write(new, variables, |_, variable| Ok(variable.shallow_clone()))?;
                }
                SavedPart::Merged(lora) => {
                    let inputs_first = self.config.inputs_first();
                    let own = variables.iter().filter(|(name, _)| !Lora::is_adapter(name));
                    let own: Vec<_> =
                        own.map(|(name, own)| (name.clone(), own.shallow_clone())).collect();
                    self.write(new, &own, |name, weight| {
                        lora.merged_weight(name, weight, variables, inputs_first)
                    })?;
                }
                SavedPart::Adapter(lora) => self.write_adapter(new, lora, variables)?,
            }
            self.copy_tokenizer(new)?;
            Ok(add(new)?)
        })
    }

    fn write(
        &self,
        new: &Path,
        variables: &[(String, Tensor)],
        make: impl FnMut(&str, &Tensor) -> brimful::Result<Tensor>,
    ) -> Result<(), PretrainedError> {
        let metadata = Metadata::from([("format".to_owned(), "pt".to_owned())]);
        save::write_made(new.join(WEIGHTS), variables, &metadata, make)?;
        json::write(&new.join(CONFIG), &self.told_of(variables))
    }

    /// Returns config.json for these variables, with their dtype.
    fn told_of(&self, variables: &[(String, Tensor)]) -> Value {
        let mut told = self.told.clone();
        let kind = variables.first().map_or(Kind::Float, |(_, tensor)| tensor.kind());
        let word = match kind {
            Kind::BFloat16 => "bfloat16",
            Kind::Half => "float16",
            Kind::Double => "float64",
            _ => "float32",
        };
        // Keeps the older name of the field, if the file has it.
        let field = if told.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        told.insert(field.into(), word.into());
        told.into()
    }

    fn copy_tokenizer(&self, into: &Path) -> Result<(), PretrainedError> {
        for name in TOKENIZER_FILES {
            let from = self.folder.join(name);
            if from.is_file() {
                fs::copy(&from, into.join(name))
                    .map_err(|reason| json::unreadable(&from, reason))?;
            }
        }
        Ok(())
    }
}

/// Refuses a folder for [`Pretrained::save`] that holds other files.
///
/// # Errors
/// Fails with the name of a file that would be lost.
pub fn check_model_place(folder: &Path) -> Result<(), PretrainedError> {
    check_place(folder, &[CONFIG, WEIGHTS])
}
