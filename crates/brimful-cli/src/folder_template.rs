//! How a folder writes conversations: its template, and the tokens that this one knows by name.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use crate::files::text_of;
use crate::jinja_template::JinjaTemplate;

/// The file that says it.
const FILE: &str = "tokenizer_config.json";
/// Where newer folders have their template.
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The tokens that templates know by name.
const TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// How a folder writes conversations.
#[derive(Debug)]
pub(crate) struct FolderTemplate {
    /// Where it stands, for those who are to mend it.
    place: String,
    text: String,
    /// Tokens by what they are, as templates name them.
    tokens: BTreeMap<String, String>,
    /// Not looked into before the first conversation: who trains on other texts needs none.
    understood: OnceLock<Result<JinjaTemplate, String>>,
}

impl FolderTemplate {
    /// The folder's template, if it has one.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILE);
        let told = match path.is_file() {
            true => serde_json::from_str(&text_of(&path)?)
                .with_context(|| format!("{} is no JSON", path.display()))?,
            false => Value::Null,
        };
        let own = folder.join(TEMPLATE_FILE);
        let (place, text) = match (own.is_file(), usual_template(&told["chat_template"])) {
            (true, _) => (own.display().to_string(), text_of(&own)?),
            (false, Some(text)) => {
                (format!("the chat_template of {}", path.display()), text.to_owned())
            }
            (false, None) => return Ok(None),
        };
        let token = |name: &&str| Some(((*name).to_owned(), token_text(&told[*name])?));
        let tokens = TOKENS.iter().filter_map(token).collect();
        Ok(Some(Self { place, text, tokens, understood: OnceLock::new() }))
    }

    /// The template, ready to write.
    pub(crate) fn understood(&self) -> Result<&JinjaTemplate> {
        let Self { place, text, tokens, understood } = self;
        let new = || JinjaTemplate::new(place, text, tokens).map_err(|error| error.to_string());
        understood.get_or_init(new).as_ref().map_err(|error| anyhow!("{error}"))
    }
}

/// A token stands there as text, or with how it is found in texts.
fn token_text(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}

/// One template stands there as text; of several, each with its name, one is the usual one.
fn usual_template(told: &Value) -> Option<&str> {
    let is_usual = |one: &&Value| one["name"] == "default";
    let named = || told.as_array()?.iter().find(is_usual)?["template"].as_str();
    told.as_str().or_else(named)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(files: &[(&str, &str)]) -> Result<Option<FolderTemplate>> {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            fs::write(folder.path().join(name), text).expect("written");
        }
        FolderTemplate::read(folder.path())
    }

    fn found(files: &[(&str, &str)]) -> FolderTemplate {
        read(files).expect("files").expect("a template")
    }

    #[test]
    fn tokens_and_templates_are_found_in_each_form() {
        let told = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false},
            "chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]}"#;
        let usual = found(&[(FILE, told)]);
        assert_eq!(usual.text, "usual");
        let tokens: Vec<_> = usual.tokens.values().map(String::as_str).collect();
        assert_eq!(tokens, ["<s>", "</s>"]);
        let one = found(&[(FILE, r#"{"chat_template": "one"}"#)]);
        assert_eq!(one.text, "one");
        assert!(one.place.starts_with("the chat_template of "), "{}", one.place);
        assert_eq!(found(&[(FILE, told), (TEMPLATE_FILE, "own")]).text, "own");
    }

    #[test]
    fn a_folder_may_have_none_and_one_that_cannot_be_read_is_named() {
        assert!(read(&[]).expect("nothing").is_none());
        assert!(read(&[(FILE, "{}")]).expect("nothing").is_none());
        let error = read(&[(FILE, "{")]).expect_err("no JSON");
        assert!(format!("{error:#}").contains("tokenizer_config.json is no JSON"), "{error:#}");
    }
}
