//! Tokenizer and chat template of a folder, built from its files as transformers' `AutoTokenizer` does.
//!
//! Some tokenizer classes of transformers take only the vocabulary, the merges and the special tokens from
//! tokenizer.json; their code fixes normalisation and splitting. [`TokenizerClass::rebuild`] does the same. All
//! other classes follow tokenizer.json.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow};
use serde_json::{Map, Value, json};
use tokenizers::{AddedToken, Tokenizer};

use crate::exit::wrong_use;
use crate::files::text_of;
use crate::jinja_template::JinjaTemplate;

pub(crate) const FILE: &str = "tokenizer.json";
/// The two files of a byte-level tokenizer in the older form, without tokenizer.json.
const VOCABULARY: &str = "vocab.json";
const MERGES: &str = "merges.txt";
/// Files of tokenizers in unsupported forms.
const OTHERS: [&str; 6] = [
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    VOCABULARY,
    "tekken.json",
];
/// Names of special tokens, in the order in which new ones are numbered.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Text that tokenizer.json contains if, and only if, the tokenizer is byte-level.
const BYTE_LEVEL: &str = "\"ByteLevel\"";
/// Regular expression with which Qwen's tokenizers split text.
const QWEN_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Class of a folder's tokenizer in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenizerClass {
    Llama,
    Gpt2,
    Qwen2,
    /// Any other class; tokenizer.json alone describes the tokenizer.
    AsSaved,
}

/// Reads the folder's tokenizer, if the folder has one, and the tokenizer's class.
pub(crate) fn read(
    folder: &Path,
    told: &TokenizerConfig,
) -> Result<(Option<Tokenizer>, TokenizerClass)> {
    let path = folder.join(FILE);
    if !path.is_file() {
        let class = TokenizerClass::of(folder, told, true)?;
        return Ok((older(folder, class, told)?, class));
    }
    let unread = || format!("{} cannot be read", path.display());
    let text = text_of(&path)?;
    let class = TokenizerClass::of(folder, told, text.contains(BYTE_LEVEL))?;
    let mut parts: Value = serde_json::from_str(&text).with_context(unread)?;
    class.rebuild(&mut parts, told);
    let mut tokenizer = built(&parts).with_context(unread)?;
    let known = tokenizer.get_added_tokens_decoder();
    let mut special: Vec<_> = class.special_tokens(told);
    special.retain(|token| {
        tokenizer.token_to_id(token).is_some()
            && known.values().all(|known| known.content != *token)
    });
    add(&mut tokenizer, special)?;
    Ok((Some(tokenizer), class))
}

/// Reads the tokenizer of a folder without tokenizer.json.
fn older(
    folder: &Path,
    class: TokenizerClass,
    told: &TokenizerConfig,
) -> Result<Option<Tokenizer>> {
    let [vocabulary, merges] = [VOCABULARY, MERGES].map(|name| folder.join(name));
    let is_read = class != TokenizerClass::AsSaved && vocabulary.is_file() && merges.is_file();
    if !is_read {
        return match OTHERS.into_iter().find(|name| folder.join(name).is_file()) {
            Some(found) => Err(wrong_use(unread(folder, found))),
            None => Ok(None),
        };
    }
    let mut parts = json!({ "version": "1.0", "added_tokens": [], "model": {
        "type": "BPE", "vocab": json_of(&vocabulary)?, "merges": merges_of(&text_of(&merges)?) } });
    class.rebuild(&mut parts, told);
    let mut tokenizer = built(&parts).with_context(|| {
        format!("{VOCABULARY} and {MERGES} of {} cannot be read", folder.display())
    })?;
    add(&mut tokenizer, listed_tokens(folder, told)?)?;
    add(&mut tokenizer, class.special_tokens(told))?;
    frame(&mut tokenizer, class, told)?;
    Ok(Some(tokenizer))
}

fn built(parts: &Value) -> Result<Tokenizer> {
    parts.to_string().parse().map_err(|error| anyhow!("{error}"))
}

/// Returns the lines of merges.txt, without empty lines and the version line.
fn merges_of(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.is_empty() && !line.starts_with("#version")).collect()
}

/// Returns the remedy for a folder with a tokenizer in an unsupported form.
fn unread(folder: &Path, found: &str) -> String {
    let folder = folder.display();
    format!(
        "{folder} has {found}, but no {FILE}, which alone is read: make it with python3 -c 'from transformers import \
         AutoTokenizer; AutoTokenizer.from_pretrained(\"{folder}\").save_pretrained(\"{folder}\")'"
    )
}

/// Lists the tokens that a folder in the older form adds to its vocabulary, by number.
fn listed_tokens(folder: &Path, told: &TokenizerConfig) -> Result<Vec<String>> {
    let decoder = told.get("added_tokens_decoder").as_object();
    let added = json_of(&folder.join("added_tokens.json"))?;
    let mut listed: Vec<(u64, String)> = match decoder {
        Some(decoder) => decoder
            .iter()
            .filter_map(|(id, token)| {
                Some((id.parse().ok()?, token["content"].as_str()?.to_owned()))
            })
            .collect(),
        None => {
            let added = added.as_object().into_iter().flatten();
            added.filter_map(|(token, id)| Some((id.as_u64()?, token.clone()))).collect()
        }
    };
    listed.sort();
    Ok(listed.into_iter().map(|(_, token)| token).collect())
}

/// Adds special tokens, which are matched as a whole anywhere in a text.
fn add(tokenizer: &mut Tokenizer, tokens: Vec<String>) -> Result<()> {
    let tokens = tokens.into_iter().map(|token| AddedToken::from(token, true));
    tokenizer.add_special_tokens(tokens).map(drop).map_err(|error| anyhow!("{error}"))
}

/// Adds a post-processor that puts the special tokens of tokenizer_config.json around texts. A tokenizer.json
/// would have its own post-processor.
fn frame(tokenizer: &mut Tokenizer, class: TokenizerClass, told: &TokenizerConfig) -> Result<()> {
    let names = told.named_tokens(class.usual_tokens());
    let wanted = |flag: &str, name: &str| {
        names.get(name).filter(|_| told.get(flag) == true).map(|token| token.to_owned())
    };
    let [begin, end] = [wanted("add_bos_token", "bos_token"), wanted("add_eos_token", "eos_token")];
    let special: Vec<_> = begin.iter().chain(&end).collect();
    if special.is_empty() {
        return Ok(());
    }
    let ids = special.iter().map(|token| {
        let id = tokenizer.token_to_id(token);
        Ok((
            (*token).clone(),
            id.with_context(|| format!("{token} is no token of its vocabulary"))?,
        ))
    });
    let ids = ids.collect::<Result<Vec<_>>>()?;
    let single: Vec<String> = begin.into_iter().chain(["$A".to_owned()]).chain(end).collect();
    let template = tokenizers::processors::template::TemplateProcessing::builder()
        .try_single(single)
        .map_err(|error| anyhow!("{error}"))?
        .special_tokens(ids)
        .build()?;
    tokenizer.with_post_processor(Some(template));
    Ok(())
}

impl TokenizerClass {
    /// Returns the class that transformers' `AutoTokenizer` chooses for the folder.
    fn of(folder: &Path, told: &TokenizerConfig, is_byte_level: bool) -> Result<Self> {
        let config = json_of(&folder.join("config.json"))?;
        let class = [told.get("tokenizer_class"), &config["tokenizer_class"]];
        let class = class.into_iter().find_map(Value::as_str);
        let class = class.map(|name| name.strip_suffix("Fast").unwrap_or(name));
        Ok(match (config["model_type"].as_str(), class) {
            // Folders of these model types often name a class that is not the type's class, so the type decides.
            (Some("qwen2"), _) => Self::Qwen2,
            (Some("mistral"), _) => Self::AsSaved,
            (_, Some("LlamaTokenizer")) if !is_byte_level => Self::Llama,
            (_, Some("GPT2Tokenizer")) | (Some("gpt2"), None) => Self::Gpt2,
            (_, Some("Qwen2Tokenizer")) => Self::Qwen2,
            _ => Self::AsSaved,
        })
    }

    /// Returns the class's special tokens by name. A folder can name other tokens, which replace them.
    pub(crate) fn usual_tokens(self) -> &'static [(&'static str, &'static str)] {
        const END: &str = "<|endoftext|>";
        match self {
            Self::Llama => &[("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")],
            Self::Gpt2 => &[("bos_token", END), ("eos_token", END), ("unk_token", END)],
            Self::Qwen2 => &[("eos_token", END), ("pad_token", END), ("unk_token", END)],
            Self::AsSaved => &[],
        }
    }

    /// Lists the special tokens, which are matched as a whole anywhere in a text.
    fn special_tokens(self, told: &TokenizerConfig) -> Vec<String> {
        let mut named = told.named_tokens(self.usual_tokens());
        let mut tokens: Vec<_> = NAMES.iter().filter_map(|name| named.remove(*name)).collect();
        tokens.extend(named.into_values());
        tokens.extend(told.unnamed_tokens());
        tokens
    }

    /// Replaces normalisation, splitting and decoding in `parts` with the class's own.
    fn rebuild(self, parts: &mut Value, told: &TokenizerConfig) {
        let prefix = told.get("add_prefix_space").as_bool();
        let (normalizer, splits, decoder, falls_back) = match self {
            _ if parts["model"]["type"] != "BPE" => return,
            Self::AsSaved => return,
            Self::Llama => (Value::Null, llama_splits(prefix, told), llama_decoder(prefix), true),
            Self::Gpt2 => (Value::Null, bytes(prefix, true), bytes(None, true), false),
            Self::Qwen2 => {
                let words = json!({ "type": "Split", "pattern": { "Regex": QWEN_WORDS },
                                    "behavior": "Isolated", "invert": false });
                let splits =
                    json!({ "type": "Sequence", "pretokenizers": [words, bytes(prefix, false)] });
                (json!({ "type": "NFC" }), splits, bytes(None, true), false)
            }
        };
        let [vocabulary, merges] = ["vocab", "merges"].map(|key| parts["model"][key].take());
        parts["model"] = json!({ "type": "BPE", "vocab": vocabulary, "merges": merges,
                                 "fuse_unk": falls_back, "byte_fallback": falls_back });
        parts["normalizer"] = normalizer;
        parts["pre_tokenizer"] = splits;
        parts["decoder"] = decoder;
    }
}

/// Makes a step that maps each byte to a character. If `splits` is true, the step also splits the text into words.
fn bytes(prefix: Option<bool>, splits: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": prefix.unwrap_or(false), "trim_offsets": true,
            "use_regex": splits })
}

fn llama_splits(prefix: Option<bool>, told: &TokenizerConfig) -> Value {
    let scheme = match (prefix, told.get("legacy").as_bool()) {
        (Some(false), _) => "never",
        (_, Some(true)) => "always",
        _ => "first",
    };
    json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false })
}

fn llama_decoder(prefix: Option<bool>) -> Value {
    let mut steps = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix != Some(false) {
        steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": steps })
}

const CONFIG_FILE: &str = "tokenizer_config.json";
/// File that is read if tokenizer_config.json has no `added_tokens_decoder`.
const OLDER_CONFIG: &str = "special_tokens_map.json";
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
    /// Reads the folder's settings. Without a file, all settings are null.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        let mut told = json_of(&path)?;
        if told["added_tokens_decoder"].is_null()
            && let Value::Object(older) = json_of(&folder.join(OLDER_CONFIG))?
        {
            if told.is_null() {
                told = Value::Object(Default::default());
            }
            older.into_iter().for_each(|(key, token)| told[key] = token);
        }
        Ok(Self { path, told })
    }

    /// Returns the setting with this key, or null.
    pub(crate) fn get(&self, key: &str) -> &Value {
        &self.told[key]
    }

    /// Returns the tokens by name, such as `bos_token`. `usual` has the defaults of the tokenizer's class.
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

/// Reads the JSON object in a file, or returns null if the file does not exist.
pub(crate) fn json_of(path: &Path) -> Result<Value> {
    if !path.is_file() {
        return Ok(Value::Null);
    }
    let object: Result<Map<String, Value>, _> = serde_json::from_str(&text_of(path)?);
    let wrong = |error| wrong_use(format!("{} is no JSON object: {error}", path.display()));
    object.map(Value::Object).map_err(wrong)
}

/// Returns the text of a token, which is a string, or an object with a `content`.
fn token_text(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}

/// File of the template in newer folders.
const TEMPLATE_FILE: &str = "chat_template.jinja";

/// Chat template of a folder.
#[derive(Debug)]
pub(crate) struct FolderTemplate {
    /// Place of the template, for error messages.
    place: String,
    text: String,
    /// Tokens by the names that templates use.
    tokens: BTreeMap<String, String>,
    /// Parsed template. It is parsed at the first conversation, because training on plain texts needs no valid
    /// template.
    understood: OnceLock<Result<JinjaTemplate, String>>,
}

impl FolderTemplate {
    /// Reads the folder's template, if the folder has one. `usual` has the default tokens of the tokenizer's
    /// class, by name.
    pub(crate) fn read(
        folder: &Path,
        told: &TokenizerConfig,
        usual: &[(&str, &str)],
    ) -> Result<Option<Self>> {
        let own = folder.join(TEMPLATE_FILE);
        let (place, text) = match (own.is_file(), usual_template(told.get("chat_template"))) {
            (true, _) => (own.display().to_string(), text_of(&own)?),
            (false, Some(text)) => {
                (format!("the chat_template of {}", told.path.display()), text.to_owned())
            }
            (false, None) => return Ok(None),
        };
        let tokens = told.named_tokens(usual);
        Ok(Some(Self { place, text, tokens, understood: OnceLock::new() }))
    }

    /// Returns whether the template contains this text.
    pub(crate) fn mentions(&self, text: &str) -> bool {
        self.text.contains(text)
    }

    /// Returns the parsed template.
    pub(crate) fn understood(&self) -> Result<&JinjaTemplate> {
        let Self { place, text, tokens, understood } = self;
        let new = || JinjaTemplate::new(place, text, tokens).map_err(|error| error.to_string());
        understood.get_or_init(new).as_ref().map_err(|error| anyhow!("{error}"))
    }
}

/// Returns the only template, or among several named templates the default template.
fn usual_template(told: &Value) -> Option<&str> {
    let is_usual = |one: &&Value| one["name"] == "default";
    let named = || told.as_array()?.iter().find(is_usual)?["template"].as_str();
    told.as_str().or_else(named)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn tokenizers_in_other_forms_are_refused_with_the_remedy() {
        for found in OTHERS {
            let folder = tempfile::tempdir().expect("a folder");
            fs::write(folder.path().join(found), "{}").expect("written");
            let told = TokenizerConfig::read(folder.path()).expect("none");
            let error = read(folder.path(), &told).expect_err(found).to_string();
            assert!(error.contains(&format!("has {found}, but no tokenizer.json")), "{error}");
            assert!(error.contains("AutoTokenizer.from_pretrained("), "{error}");
        }
    }

    #[test]
    fn classes_are_those_that_transformers_takes() {
        for (model, class, is_byte_level, expected) in [
            ("llama", "LlamaTokenizer", false, TokenizerClass::Llama),
            ("llama", "LlamaTokenizerFast", true, TokenizerClass::AsSaved),
            ("mistral", "LlamaTokenizer", false, TokenizerClass::AsSaved),
            ("qwen2", "LlamaTokenizerFast", true, TokenizerClass::Qwen2),
            ("gpt2", "", true, TokenizerClass::Gpt2),
            ("gpt2", "PreTrainedTokenizerFast", true, TokenizerClass::AsSaved),
            ("llama", "", false, TokenizerClass::AsSaved),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let class = Some(class).filter(|class| !class.is_empty());
            let [config, told] =
                [json!({ "model_type": model }), json!({ "tokenizer_class": class })];
            fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
            fs::write(folder.path().join("tokenizer_config.json"), told.to_string())
                .expect("written");
            let told = TokenizerConfig::read(folder.path()).expect("settings");
            let found = TokenizerClass::of(folder.path(), &told, is_byte_level).expect("a class");
            assert_eq!(found, expected, "{model} {class:?}");
        }
    }

    #[test]
    fn settings_that_are_no_object_are_refused_by_their_file() {
        for (file, text) in [(CONFIG_FILE, "[]"), (CONFIG_FILE, "7"), (OLDER_CONFIG, "\"text\"")] {
            let folder = tempfile::tempdir().expect("a folder");
            for name in [CONFIG_FILE, OLDER_CONFIG] {
                let text = if name == file { text } else { r#"{"bos_token": "<s>"}"# };
                fs::write(folder.path().join(name), text).expect("written");
            }
            let error = TokenizerConfig::read(folder.path()).expect_err(text).to_string();
            assert!(error.contains(&format!("{file} is no JSON object: invalid type")), "{error}");
        }
    }

    fn read_template(files: &[(&str, &str)]) -> Result<Option<FolderTemplate>> {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            fs::write(folder.path().join(name), text).expect("written");
        }
        FolderTemplate::read(folder.path(), &TokenizerConfig::read(folder.path())?, &[])
    }

    fn found(files: &[(&str, &str)]) -> FolderTemplate {
        read_template(files).expect("files").expect("a template")
    }

    #[test]
    fn tokens_and_templates_are_found_in_each_form() {
        let told = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false},
            "chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]}"#;
        let usual = found(&[(CONFIG_FILE, told)]);
        assert_eq!(usual.text, "usual");
        let tokens: Vec<_> = usual.tokens.values().map(String::as_str).collect();
        assert_eq!(tokens, ["<s>", "</s>"]);
        let one = found(&[(CONFIG_FILE, r#"{"chat_template": "one"}"#)]);
        assert_eq!(one.text, "one");
        assert!(one.place.starts_with("the chat_template of "), "{}", one.place);
        assert_eq!(found(&[(CONFIG_FILE, told), (TEMPLATE_FILE, "own")]).text, "own");
    }

    #[test]
    fn a_folder_may_have_none_and_one_that_cannot_be_read_is_named() {
        assert!(read_template(&[]).expect("nothing").is_none());
        assert!(read_template(&[(CONFIG_FILE, "{}")]).expect("nothing").is_none());
        let error = read_template(&[(CONFIG_FILE, "{")]).expect_err("no JSON");
        assert!(format!("{error:#}").contains("tokenizer_config.json is no JSON"), "{error:#}");
    }
}
