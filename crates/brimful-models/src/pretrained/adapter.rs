//! LoRA's weights in PEFT's format: adapter_config.json and adapter_model.safetensors.

use std::path::Path;

use brimful::nn::{Lora, WeightOrder};
use brimful::save::{self, Metadata, OpenedFile};
use serde_json::{Value, json};
use tch::Tensor;

use super::fields::Fields;
use super::taken_place::check_place;
use super::{Pretrained, PretrainedError, json as files};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// What PEFT puts before the names of the model's own variables.
const PREFIX: &str = "base_model.model.";

/// A folder with LoRA's weights, which were trained beside those of a model.
#[derive(Debug)]
pub struct AdapterFolder {
    folder: String,
    file: OpenedFile,
    lora: Lora,
}

impl AdapterFolder {
    /// Opens a folder, and reads all of it but the weights.
    ///
    /// # Errors
    /// When files are missing or cannot be understood, or ask for another method than LoRA.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, PretrainedError> {
        let folder = folder.as_ref();
        let path = folder.join(CONFIG);
        let read = files::read(&path)?;
        let fields = Fields::new(&path, &read);
        fields.only("peft_type", &["LORA"])?;
        for field in ["use_dora", "use_rslora", "use_qalora", "lora_bias"] {
            let set = fields.flag_or(field, false)?;
            fields.check(field, !set, || "is true: it can be false alone".into())?;
        }
        fields.only("bias", &["none"])?;
        for field in ["modules_to_save", "rank_pattern", "alpha_pattern"] {
            fields.check(field, fields.is_empty(field), || {
                "is given: it can be empty alone".into()
            })?;
        }
        let rank = fields.positive("r")?;
        let alpha = fields.number_or("lora_alpha", rank as f64)?;
        let targets = fields.value("target_modules").and_then(Value::as_array);
        let targets = targets
            .ok_or_else(|| fields.wrong("target_modules", "is missing, or is no list of names"))?;
        let targets = targets.iter().filter_map(Value::as_str).map(str::to_owned).collect();
        let lora = Lora { rank, alpha, targets };
        let file = OpenedFile::open(folder.join(WEIGHTS))?;
        Ok(Self { folder: folder.display().to_string(), file, lora })
    }

    /// What the model's layers are to have: see [`Layers::lora`](brimful::Layers::lora).
    pub fn lora(&self) -> &Lora {
        &self.lora
    }

    /// Copies the weights into the variables of their names, of a model or of a part of it.
    ///
    /// # Errors
    /// When one has none here, or one of another shape; nothing is changed then.
    pub fn load(&self, variables: &[(String, Tensor)]) -> Result<(), PretrainedError> {
        let wanted = || variables.iter().filter(|(name, _)| Lora::is_adapter(name));
        let differences: Vec<String> = wanted()
            .filter_map(|(name, variable)| match self.file.shape(&format!("{PREFIX}{name}")) {
                Some(found) if found == variable.size() => None,
                Some(found) => Some(format!("{name} is {found:?}, not {:?}", variable.size())),
                None => Some(format!("{name} is missing")),
            })
            .collect();
        if !differences.is_empty() {
            let folder = self.folder.clone();
            return Err(PretrainedError::Tensors { folder, differences });
        }
        for (name, variable) in wanted() {
            self.file.copy(&format!("{PREFIX}{name}"), variable)?;
        }
        Ok(())
    }
}

impl Pretrained {
    /// Writes the weights that LoRA has added to a folder that PEFT loads beside this model, whole or not at
    /// all, with the tokenizer's files.
    ///
    /// # Errors
    /// When there are none, the folder holds something else, or the file system refuses.
    pub fn save_adapter(
        &self,
        folder: impl AsRef<Path>,
        lora: &Lora,
        variables: &[(String, Tensor)],
    ) -> Result<(), PretrainedError> {
        let folder = folder.as_ref();
        check_adapter_place(folder)?;
        let adapters = variables.iter().filter(|(name, _)| Lora::is_adapter(name));
        let adapters: Vec<_> = adapters
            .map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor.shallow_clone()))
            .collect();
        save::replace_folder(folder, |new| {
            let metadata = Metadata::from([("format".to_owned(), "pt".to_owned())]);
            save::write(new.join(WEIGHTS), &adapters, &metadata)?;
            files::write(&new.join(CONFIG), &self.adapter_config(lora))?;
            self.copy_tokenizer(new)
        })
    }

    fn adapter_config(&self, lora: &Lora) -> Value {
        let targets = match lora.targets.is_empty() {
            true => self.config.projections(),
            false => lora.targets.clone(),
        };
        json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.folder.display().to_string(),
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": self.config.weight_order() == WeightOrder::InputsFirst,
            "target_modules": targets,
            "inference_mode": true,
        })
    }
}

/// Refuses a place for [`Pretrained::save_adapter`] that is taken by something else.
///
/// # Errors
/// With what would be lost.
pub fn check_adapter_place(folder: &Path) -> Result<(), PretrainedError> {
    check_place(folder, &[CONFIG, WEIGHTS])
}
