//! Chat template of a model's folder, with the tokens that it uses by name.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Result, anyhow};
use serde_json::Value;

use crate::files::text_of;
use crate::folder_tokenizer::TokenizerConfig;
use crate::jinja_template::JinjaTemplate;

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
    /// Template, parsed at the first conversation: a training on other texts needs no valid template.
    understood: OnceLock<Result<JinjaTemplate, String>>,
}

impl FolderTemplate {
    /// Reads the folder's template, if it has one; `usual` are the default tokens of the tokenizer's class, by name.
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

    /// Returns whether the template's text contains this.
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

/// Returns the only template, or the default one of several named templates.
fn usual_template(told: &Value) -> Option<&str> {
    let is_usual = |one: &&Value| one["name"] == "default";
    let named = || told.as_array()?.iter().find(is_usual)?["template"].as_str();
    told.as_str().or_else(named)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const FILE: &str = "tokenizer_config.json";

    fn read(files: &[(&str, &str)]) -> Result<Option<FolderTemplate>> {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            fs::write(folder.path().join(name), text).expect("written");
        }
        FolderTemplate::read(folder.path(), &TokenizerConfig::read(folder.path())?, &[])
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
