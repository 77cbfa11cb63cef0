//! Generation settings of a folder's model: its generation_config.json, as transformers applies it.

use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::tokenizer_config::json_of;

const FILE: &str = "generation_config.json";
/// Default of `top_k` when sampling is on.
const TOP_K: u64 = 50;
/// Keys that are used here, or do not affect the choice of tokens.
const KNOWN: [&str; 18] = [
    "eos_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    // The tokenizer adds it, and nothing is padded.
    "bos_token_id",
    "pad_token_id",
    // `--tokens` sets it.
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
    /// Tokens that end a text, if it names any.
    pub(crate) ends: Option<Vec<i64>>,
    /// Sampling parameters, if it sets any.
    pub(crate) sampling: Option<Sampling>,
    /// Settings that are not supported, as text.
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
    /// Reads the folder's settings; without a file there are none.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let told = json_of(&folder.join(FILE))?;
        let settings = told.as_object().into_iter().flatten();
        let left_out = settings
            .filter(|(key, value)| !KNOWN.contains(&key.as_str()) && has_effect(key, value))
            .map(|(key, value)| format!("{key} {value}"));
        Ok(Self {
            ends: numbers(&told["eos_token_id"]),
            sampling: told["do_sample"].as_bool().map(|draws| match draws {
                true => drawn(&told),
                false => Sampling { temperature: 0.0, ..Sampling::default() },
            }),
            left_out: left_out.collect(),
        })
    }
}

fn drawn(told: &Value) -> Sampling {
    let number = |key: &str| told[key].as_f64().unwrap_or(1.0);
    let top_k = told["top_k"].as_u64().unwrap_or(TOP_K);
    Sampling {
        temperature: number("temperature"),
        // 0 means all tokens.
        top_k: Some(top_k as usize).filter(|k| *k > 0),
        top_p: number("top_p"),
    }
}

/// Returns whether an unknown setting has an effect.
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

/// Reads a number or a list of numbers.
pub(crate) fn numbers(told: &Value) -> Option<Vec<i64>> {
    match told {
        Value::Array(several) => Some(several.iter().filter_map(Value::as_i64).collect()),
        one => one.as_i64().map(|one| vec![one]),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(told: &str) -> GenerationConfig {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join(FILE), told).expect("written");
        GenerationConfig::read(folder.path()).expect("settings")
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
