//! Generation settings in a folder's generation_config.json, with the defaults and meanings of transformers.

use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::exit::wrong_use;
use crate::folder_tokenizer::json_of;

const FILE: &str = "generation_config.json";
/// Default of `top_k` when sampling is on.
const TOP_K: u64 = 50;
/// Keys that are supported, or do not affect the choice of tokens.
const KNOWN: [&str; 18] = [
    "eos_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    // The tokenizer adds the first token, and generation pads nothing.
    "bos_token_id",
    "pad_token_id",
    // `--tokens` sets the length.
    "max_length",
    "max_new_tokens",
    "use_cache",
    "cache_implementation",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "transformers_version",
    "chat_format",
];

/// Settings of a folder's generation_config.json.
#[derive(Debug, Default)]
pub(crate) struct GenerationConfig {
    /// Tokens that end a text, if the file names any.
    pub(crate) ends: Option<Vec<i64>>,
    /// Sampling parameters, if the file sets `do_sample`.
    pub(crate) sampling: Option<Sampling>,
    /// Settings of the file that are not supported, each as text.
    pub(crate) left_out: Vec<String>,
}

/// Sampling parameters of the next token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampling {
    /// Temperature; 0 takes the likeliest token.
    pub(crate) temperature: f64,
    /// Number of likeliest tokens to sample from.
    pub(crate) top_k: Option<usize>,
    /// Total probability of the likeliest tokens to sample from.
    pub(crate) top_p: f64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: 1.0 }
    }
}

impl GenerationConfig {
    /// Reads the folder's settings. Without a file, nothing is set.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let told = json_of(&path)?;
        let file = SettingsFile { path: &path, told: &told };
        let settings = told.as_object().into_iter().flatten();
        let left_out = settings
            .filter(|(key, value)| !KNOWN.contains(&key.as_str()) && has_effect(key, value))
            .map(|(key, value)| format!("{key} {value}"));
        let drawn = file.drawn()?;
        let draws = file.setting("do_sample", "true or false", Value::as_bool)?;
        Ok(Self {
            ends: file.setting("eos_token_id", "a token's number or a list of them", tokens)?,
            sampling: draws.map(|draws| match draws {
                true => drawn,
                false => Sampling { temperature: 0.0, ..Sampling::default() },
            }),
            left_out: left_out.collect(),
        })
    }
}

/// Settings file: its path, for error messages, and its content.
#[derive(Debug, Clone, Copy)]
struct SettingsFile<'a> {
    path: &'a Path,
    told: &'a Value,
}

impl SettingsFile<'_> {
    /// Reads a setting, or refuses its value with an error that asks for a `wanted` value. A null counts as
    /// absent.
    fn setting<T>(
        self,
        key: &str,
        wanted: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let value = &self.told[key];
        if value.is_null() {
            return Ok(None);
        }
        let path = self.path.display();
        let wrong = || wrong_use(format!("{path}: {key} is {value}: make it {wanted}"));
        read(value).map(Some).ok_or_else(wrong)
    }

    fn drawn(self) -> Result<Sampling> {
        let temperature = self.setting("temperature", "a number from 0 on", |value| {
            value.as_f64().filter(|temperature| *temperature >= 0.0)
        })?;
        let top_p = self.setting("top_p", "a number above 0, 1 at most", |value| {
            value.as_f64().filter(|top_p| *top_p > 0.0 && *top_p <= 1.0)
        })?;
        let top_k = self.setting("top_k", "a whole number from 0 on", Value::as_u64)?;
        Ok(Sampling {
            temperature: temperature.unwrap_or(1.0),
            // 0 means all tokens.
            top_k: Some(top_k.unwrap_or(TOP_K) as usize).filter(|k| *k > 0),
            top_p: top_p.unwrap_or(1.0),
        })
    }
}

/// Returns whether an unknown setting has a value that would change generation.
fn has_effect(key: &str, value: &Value) -> bool {
    let nothing = match key {
        _ if key.starts_with('_') => return false,
        "repetition_penalty"
        | "encoder_repetition_penalty"
        | "typical_p"
        | "length_penalty"
        | "num_beams"
        | "num_beam_groups"
        | "num_return_sequences"
        | "guidance_scale" => 1.0,
        _ => 0.0,
    };
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Number(number) => number.as_f64() != Some(nothing),
        Value::Array(list) => !list.is_empty(),
        _ => true,
    }
}

/// Reads a token's number or a list of them.
fn tokens(told: &Value) -> Option<Vec<i64>> {
    let token = |value: &Value| value.as_i64().filter(|token| *token >= 0);
    match told {
        Value::Array(several) => several.iter().map(token).collect(),
        one => Some(vec![token(one)?]),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::exit::Exit;

    fn try_read(told: &str) -> Result<GenerationConfig> {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join(FILE), told).expect("written");
        GenerationConfig::read(folder.path())
    }

    fn read(told: &str) -> GenerationConfig {
        try_read(told).expect("settings")
    }

    #[test]
    fn values_that_cannot_be_are_refused_with_their_field() {
        for (told, complaint) in [
            (r#"{"temperature": -3}"#, "temperature is -3: make it a number from 0 on"),
            (r#"{"do_sample": true, "temperature": "hot"}"#, "temperature is \"hot\": make it"),
            (r#"{"top_p": 7}"#, "top_p is 7: make it a number above 0, 1 at most"),
            (r#"{"top_k": -1}"#, "top_k is -1: make it a whole number from 0 on"),
            (r#"{"do_sample": 1}"#, "do_sample is 1: make it true or false"),
            (r#"{"eos_token_id": "x"}"#, "eos_token_id is \"x\": make it a token's number"),
            (r#"{"eos_token_id": [7, -5]}"#, "eos_token_id is [7,-5]: make it a token's number"),
            ("[]", "is no JSON object"),
            ("{", "is no JSON object: EOF"),
        ] {
            let error = try_read(told).expect_err(told);
            assert_eq!(Exit::of(&error), Exit::WrongUse, "{error:#}");
            let error = format!("{error:#}");
            assert!(error.contains(FILE) && error.contains(complaint), "{error}");
        }
        assert_eq!(read(r#"{"temperature": null, "eos_token_id": null}"#).ends, None);
    }

    #[test]
    fn sampling_is_what_transformers_makes_of_the_file() {
        let sampling = |told| read(told).sampling;
        assert_eq!(sampling("{}"), None);
        let likeliest = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(sampling(r#"{"do_sample": false, "temperature": 0.6}"#), Some(likeliest));
        let usual = Sampling { temperature: 1.0, top_k: Some(50), top_p: 1.0 };
        assert_eq!(sampling(r#"{"do_sample": true}"#), Some(usual));
        let told = r#"{"do_sample": true, "temperature": 0.6, "top_k": 0, "top_p": 0.9}"#;
        assert_eq!(sampling(told), Some(Sampling { temperature: 0.6, top_k: None, top_p: 0.9 }));
    }

    #[test]
    fn ends_are_one_or_several_and_settings_that_change_texts_are_named() {
        assert_eq!(read(r#"{"eos_token_id": 7}"#).ends, Some(vec![7]));
        assert_eq!(read(r#"{"eos_token_id": [7, 9]}"#).ends, Some(vec![7, 9]));
        assert_eq!(read("{}").ends, None);
        let told = r#"{"_from_model_config": true, "repetition_penalty": 1.05, "num_beams": 1,
            "suppress_tokens": [], "min_p": null, "min_length": 3, "transformers_version": "5"}"#;
        assert_eq!(read(told).left_out, ["min_length 3", "repetition_penalty 1.05"]);
    }
}
