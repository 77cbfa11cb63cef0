//! Settings of a folder's tokenizer: tokenizer_config.json and, in older folders, special_tokens_map.json.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::files::text_of;

const FILE: &str = "tokenizer_config.json";
/// Read if tokenizer_config.json has no `added_tokens_decoder`.
const OLDER_FILE: &str = "special_tokens_map.json";
/// Keys of the lists of special tokens without names, the newer key first.
const UNNAMED: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

/// Settings of a folder's tokenizer.
#[derive(Debug)]
pub(crate) struct TokenizerConfig {
    /// Path of the settings.
    pub(crate) path: PathBuf,
    told: Value,
}

impl TokenizerConfig {
    /// Reads the folder's settings; without a file there are none.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let mut told = json_of(&path)?;
        if told["added_tokens_decoder"].is_null()
            && let Value::Object(older) = json_of(&folder.join(OLDER_FILE))?
        {
            if told.is_null() {
                told = Value::Object(Default::default());
            }
            older.into_iter().for_each(|(key, token)| told[key] = token);
        }
        Ok(Self { path, told })
    }

    /// Returns the setting of this name, or null.
    pub(crate) fn get(&self, key: &str) -> &Value {
        &self.told[key]
    }

    /// Returns tokens by name, such as `bos_token`; `usual` are the defaults of the tokenizer's class.
    pub(crate) fn named_tokens(&self, usual: &[(&str, &str)]) -> BTreeMap<String, String> {
        let usual = usual.iter().map(|(name, token)| ((*name).to_owned(), (*token).to_owned()));
        let mut tokens: BTreeMap<_, _> = usual.collect();
        for (name, token) in self.told.as_object().into_iter().flatten() {
            match token_text(token).filter(|_| name.ends_with("_token")) {
                Some(text) => tokens.insert(name.clone(), text),
                // A null removes the class's own token.
                None => tokens.remove(name),
            };
        }
        tokens
    }

    /// Lists the special tokens without names.
    pub(crate) fn unnamed_tokens(&self) -> Vec<String> {
        let listed = UNNAMED.iter().find_map(|key| self.told[*key].as_array());
        listed.into_iter().flatten().filter_map(token_text).collect()
    }
}

/// Parses a JSON file; null if there is none.
pub(crate) fn json_of(path: &Path) -> Result<Value> {
    if !path.is_file() {
        return Ok(Value::Null);
    }
    serde_json::from_str(&text_of(path)?).with_context(|| format!("{} is no JSON", path.display()))
}

/// Returns the text of a token, given as a string or as an object with its content.
fn token_text(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}
