//! Settings of a folder's tokenizer: tokenizer_config.json and, in older folders, special_tokens_map.json.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Map, Value};

use crate::exit::wrong_use;
use crate::files::text_of;

const FILE: &str = "tokenizer_config.json";
/// File that is read if tokenizer_config.json has no `added_tokens_decoder`.
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

/// Reads the JSON object in a file; null if there is no file.
pub(crate) fn json_of(path: &Path) -> Result<Value> {
    if !path.is_file() {
        return Ok(Value::Null);
    }
    let object: Result<Map<String, Value>, _> = serde_json::from_str(&text_of(path)?);
    let wrong = |error| wrong_use(format!("{} is no JSON object: {error}", path.display()));
    object.map(Value::Object).map_err(wrong)
}

/// Returns the text of a token, given as a string or as an object with its content.
fn token_text(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn settings_that_are_no_object_are_refused_by_their_file() {
        for (file, text) in [(FILE, "[]"), (FILE, "7"), (OLDER_FILE, "\"text\"")] {
            let folder = tempfile::tempdir().expect("a folder");
            for name in [FILE, OLDER_FILE] {
                let text = if name == file { text } else { r#"{"bos_token": "<s>"}"# };
                fs::write(folder.path().join(name), text).expect("written");
            }
            let error = TokenizerConfig::read(folder.path()).expect_err(text).to_string();
            assert!(error.contains(&format!("{file} is no JSON object: invalid type")), "{error}");
        }
    }
}
