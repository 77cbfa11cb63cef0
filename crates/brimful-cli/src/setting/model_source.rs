//! Where a model comes from: one that the program knows by name, or a folder of Hugging Face's.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Result, bail};

use super::ModelName;

/// What `--model` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A model that the program knows.
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
        text.parse().map(Self::Named)
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
