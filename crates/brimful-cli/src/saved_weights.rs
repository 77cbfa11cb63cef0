//! Weights of a trained model by name, from a file of `brimful train --save` or any other safetensors file with
//! the model's names.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use brimful::memory::Memory;
use brimful::save::{self, Metadata};
use brimful::{Layers, MicroBatcher};
use brimful_models::pretrained::RUN_FILE;
use tch::nn::{self, VarStore};
use tch::{Kind, Tensor};

use crate::exit::{ensure_unsaid, wrong_use};
use crate::model::{FineTune, ModelSource};
use crate::named::{self, Comparison, Named};
use crate::setting::{EvaluationPlace, ModelName, NumberType};

/// Prefix of an optimizer's tensors and metadata in a file that `--save` wrote.
pub(crate) const OPTIMIZER: &str = "optimizer.";
/// Prefix of the averages of weights (EMA).
pub(crate) const AVERAGES: &str = "ema.";
/// Metadata key of the number of finished epochs, which every file of a run has.
pub(crate) const EPOCH: &str = "epoch";
/// Metadata key of the flags given to a run: names and values in JSON.
pub(crate) const FLAGS: &str = "flags";
/// Metadata key of the names of a model's classes: a list in JSON.
pub(crate) const CLASSES: &str = "classes";
/// Metadata key of the scale of the training images' pixels.
pub(crate) const PIXELS: &str = "pixels";
/// Counter that PyTorch keeps with every BatchNorm layer. The program's models do not use it.
const COUNTER: &str = "num_batches_tracked";
/// Extensions of files written by torch.save, such as torchvision's weights.
const OF_PYTHON: [&str; 3] = ["pth", "pt", "bin"];
/// Extension of files written by tch. Reading such a file runs code in it.
const OF_TCH: &str = "ot";

/// Tensors by name, with the metadata of their file.
#[derive(Debug)]
pub(crate) struct SavedWeights {
    path: PathBuf,
    tensors: Named,
    metadata: Metadata,
}

impl SavedWeights {
    /// Reads the model's tensors from a file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let ends_in = |end: &str| path.extension().is_some_and(|found| found == end);
        if OF_PYTHON.into_iter().any(ends_in) {
            return Err(wrong_use(of_python(path)));
        }
        if ends_in(OF_TCH) {
            return Err(wrong_use(of_tch(path)));
        }
        let (tensors, metadata) = save::read(path)?;
        let averages = taken(AVERAGES, &tensors);
        // Prefers averages, because the run tested the averages, which make the better model.
        let tensors = if averages.is_empty() { model_alone(tensors) } else { averages };
        Ok(Self { path: path.to_owned(), tensors, metadata })
    }

    /// Returns all tensors.
    pub(crate) fn into_tensors(self) -> Named {
        self.tensors
    }

    /// Returns the model `asked` for, or else the model that the file names. Fails if they differ.
    pub(crate) fn model(&self, asked: Option<ModelName>) -> Result<ModelName> {
        let path = self.path.display();
        let name = self.metadata.get("model");
        let told = name.and_then(|name| name.parse::<ModelName>().ok());
        if let (Some(folder), None) = (name, told) {
            return Err(wrong_use(format!(
                "{path} is a fine-tuning run of {folder}, not a model: to write its model to a folder, run brimful train \
                 --resume {path} --save FOLDER"
            )));
        }
        match (asked, told) {
            (Some(asked), Some(told)) if asked != told => {
                Err(wrong_use(format!("{path} was trained as --model {told}, not {asked}")))
            }
            (asked, told) => asked
                .or(told)
                .ok_or_else(|| wrong_use(format!("{path} does not store its model: give --model"))),
        }
    }

    /// Returns the metadata under this key.
    pub(crate) fn told(&self, name: &str) -> Option<&str> {
        self.metadata.get(name).map(String::as_str)
    }

    /// Returns the names of the classes in order, if the file has them.
    pub(crate) fn class_names(&self) -> Option<Vec<String>> {
        serde_json::from_str(self.told(CLASSES)?).ok()
    }

    /// Returns the dtype of the first tensor, which stands for the dtype of all tensors.
    fn kind(&self) -> Kind {
        self.tensors.first().map_or(Kind::Float, |(_, tensor)| tensor.kind())
    }

    /// Returns the number of rows of the tensor with this name, if the file has one.
    pub(crate) fn rows(&self, name: &str) -> Option<i64> {
        let (_, tensor) = self.tensors.iter().find(|(named, _)| named == name)?;
        tensor.size().first().copied()
    }

    /// Copies the tensors to the variables of the same names. If names, shapes or dtypes do not match, fails and
    /// changes nothing.
    fn put_into(self, variables: Named, model: ModelName) -> Result<()> {
        let compared = Comparison::new(&variables, self.tensors);
        if let Some(differences) = compared.differences() {
            let path = self.path.display();
            return Err(wrong_use(format!("{path} does not fit {model}: {differences}")));
        }
        named::put(variables, compared.fitting)
    }
}

/// Weights of a trained model: a file with the weights of a built-in model, or a folder.
#[derive(Debug)]
pub(crate) enum Weights {
    File(SavedWeights, ModelName),
    Folder(Arc<FineTune>),
}

/// A model with trained weights on a device.
#[derive(Debug)]
pub(crate) struct LoadedModel<M> {
    pub(crate) model: M,
    pub(crate) kind: Kind,
    pub(crate) micro: MicroBatcher,
    pub(crate) memory: Memory,
}

impl Weights {
    /// Opens the weights that `--model`, `--weights` and `--adapter` name.
    pub(crate) fn open(
        model: Option<&ModelSource>,
        weights: Option<&Path>,
        adapter: Option<&Path>,
    ) -> Result<Self> {
        match (model, weights) {
            (Some(ModelSource::Folder(folder)), None) => {
                FineTune::trained(folder, adapter).map(Self::Folder)
            }
            (Some(ModelSource::Folder(_)), Some(_)) => Err(wrong_use(
                "--weights is for a built-in model: a --model folder has its own weights",
            )),
            (asked, Some(file)) => {
                let flags = [("adapter", adapter.is_some())];
                ensure_unsaid(&flags, "a model of a folder: give --model FOLDER")?;
                let asked = match asked {
                    Some(ModelSource::Named(name)) => Some(*name),
                    _ => None,
                };
                let weights = SavedWeights::read(file)?;
                let name = weights.model(asked)?;
                Ok(Self::File(weights, name))
            }
            (_, None) => Err(wrong_use("no weights: give --weights FILE, or --model FOLDER")),
        }
    }

    /// Returns the dtype of the weights in their file.
    pub(crate) fn stored_kind(&self) -> Kind {
        match self {
            Self::File(weights, _) => weights.kind(),
            Self::Folder(folder) => folder.stored_kind().unwrap_or(Kind::Float),
        }
    }

    /// Copies the weights to the variables of the same names.
    pub(crate) fn put_into(self, variables: Named) -> Result<()> {
        match self {
            Self::File(weights, name) => weights.put_into(variables, name),
            Self::Folder(folder) => folder.load(&variables),
        }
    }

    /// Builds a model on the device of `place`, and loads the weights into it. The model has `dtype`, or else the
    /// dtype of the stored weights.
    pub(crate) fn load<M>(
        self,
        layers: Layers,
        place: &EvaluationPlace,
        dtype: Option<NumberType>,
        build: impl FnOnce(&Layers, &nn::Path<'_>) -> Result<M>,
    ) -> Result<LoadedModel<M>> {
        let device = place.device()?;
        let dtype = dtype.unwrap_or_else(|| NumberType::holding(self.stored_kind()));
        dtype.prepare(device)?;
        let memory = place.memory(device)?;
        let _inside = memory.enter();
        let (store, kind) = (VarStore::new(device), dtype.kind());
        let model = build(&layers.kind(kind), &store.root())?;
        self.put_into(store.variables().into_iter().collect())?;
        let micro = MicroBatcher::new(&store, place.micro_batch_size).memory(memory.clone());
        Ok(LoadedModel { model, kind, micro, memory: memory.clone() })
    }
}

/// Returns the file of a run saved with `--save FILE`, or within a folder saved with `--save FOLDER`.
pub(crate) fn run_file(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(RUN_FILE) } else { path.to_owned() }
}

/// Returns the remedy for a file that only Python reads.
fn of_python(path: &Path) -> String {
    let (from, to) = (path.display(), path.with_extension("safetensors"));
    let to = to.display();
    format!(
        "{from} is a file of torch.save, which only Python reads: convert it to {to} with \
         python3 -c 'import torch, safetensors.torch as s; s.save_file(torch.load(\"{from}\", weights_only=True), \"{to}\")'"
    )
}

/// Returns the remedy for a file written by tch.
fn of_tch(path: &Path) -> String {
    let (from, to) = (path.display(), path.with_extension("safetensors"));
    let to = to.display();
    format!(
        "{from} is a TorchScript file of tch, which runs code when it is read: if you trust it, convert it to {to} \
         with python3 -c 'import torch, safetensors.torch as s; s.save_file({{k.replace(\"|\", \".\"): v.contiguous() for \
         k, v in torch.jit.load(\"{from}\").state_dict().items()}}, \"{to}\")'"
    )
}

/// Returns the tensors whose names have this prefix, and removes the prefix.
pub(crate) fn taken(prefix: &str, tensors: &[(String, Tensor)]) -> Named {
    let taken = |(name, tensor): &(String, Tensor)| {
        Some((name.strip_prefix(prefix)?.to_owned(), tensor.shallow_clone()))
    };
    tensors.iter().filter_map(taken).collect()
}

/// Removes the tensors that a file stores beside the model, such as the optimizer's.
pub(crate) fn model_alone(mut tensors: Named) -> Named {
    let is_beside = |name: &str| {
        [OPTIMIZER, AVERAGES].iter().any(|prefix| name.starts_with(prefix))
            || name.ends_with(COUNTER)
    };
    tensors.retain(|(name, _)| !is_beside(name));
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_python_s_is_refused_with_the_line_that_turns_it_into_one_of_ours() {
        let error =
            SavedWeights::read(Path::new("weights/resnet50.pth")).expect_err("no file of ours");
        let error = error.to_string();
        assert!(error.starts_with("weights/resnet50.pth is a file of torch.save"), "{error}");
        assert!(error.contains("convert it to weights/resnet50.safetensors"), "{error}");
        assert!(
            error.contains("torch.load(\"weights/resnet50.pth\", weights_only=True)"),
            "{error}"
        );
    }
}
