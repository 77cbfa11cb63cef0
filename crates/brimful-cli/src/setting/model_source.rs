//! Source of a model: built in, or a Hugging Face folder.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Result, anyhow, bail};

use super::ModelName;

/// Prefixes of the names of models that exist only as folders.
const FOLDERS_ALONE: [&str; 3] = ["llama", "mistral", "qwen"];

/// Value of `--model`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A built-in model.
    Named(ModelName),
    /// A folder with a config.json.
    Folder(PathBuf),
}

impl FromStr for ModelSource {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if text.contains(['/', '.']) {
            bail!("there is no folder {text}: name one with a config.json, or a model by its name");
        }
        if FOLDERS_ALONE.iter().any(|family| text.to_lowercase().starts_with(family)) {
            bail!(
                "there is no folder {text} here, and such a model is read from one: give the path of a folder \
                 with its config.json, model.safetensors and tokenizer.json"
            );
        }
        let named: Result<_> = text.parse();
        named
            .map(Self::Named)
            .map_err(|error| anyhow!("{error} (nor is there a folder {text} here)"))
    }
}

impl ModelSource {
    /// Returns a notice if a published model has the same name, because its weights are not loaded.
    pub(crate) fn notice(&self) -> Option<String> {
        let Self::Named(name) = self else { return None };
        let published =
            [ModelName::Gpt2, ModelName::Gpt2Medium, ModelName::Gpt2Large, ModelName::Gpt2Xl];
        published.contains(name).then(|| {
            format!(
                "--model {name}: there is no folder {name} here, so this is its architecture with random \
                 weights; for the published weights give the path of their folder"
            )
        })
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => name.fmt(f),
            Self::Folder(path) => path.display().fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_models_that_come_in_folders_say_that_a_folder_is_meant() {
        for name in ["llama", "Llama-3-8B", "mistral", "qwen2"] {
            let error = name.parse::<ModelSource>().expect_err(name).to_string();
            assert!(error.starts_with(&format!("there is no folder {name} here")), "{error}");
        }
    }

    #[test]
    fn a_shape_that_shares_its_name_with_a_published_model_says_so() {
        let notice = |name: &str| name.parse::<ModelSource>().expect("a model").notice();
        assert!(notice("gpt2").is_some_and(|notice| notice.contains("random weights")));
        assert_eq!((notice("gpt"), notice("mlp")), (None, None));
    }
}
