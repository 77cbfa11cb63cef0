//! What somebody says in a conversation, and a conversation's text.

use std::ops::Range;

use serde::Deserialize;
use serde_json::{Map, Value};

/// The role whose messages are answers.
pub(crate) const ANSWERS: &str = "assistant";

/// What somebody says in a conversation.
#[derive(Debug, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
pub(crate) struct ChatMessage {
    pub(crate) role: String,
    pub(crate) content: String,
    /// All that the data say of it, which templates may look at.
    pub(crate) told: Map<String, Value>,
}

impl ChatMessage {
    /// What somebody of this role says.
    pub(crate) fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let (role, content) = (role.into(), content.into());
        let fields = [("role", &role), ("content", &content)];
        let told = fields.map(|(key, text)| (key.to_owned(), text.as_str().into()));
        Self { told: told.into_iter().collect(), role, content }
    }

    /// Whether it is what a model has to say.
    pub(crate) fn is_answer(&self) -> bool {
        self.role == ANSWERS
    }
}

impl TryFrom<Map<String, Value>> for ChatMessage {
    type Error = String;

    fn try_from(mut told: Map<String, Value>) -> Result<Self, String> {
        // Templates ask whether a field is there.
        told.retain(|_, value| !value.is_null());
        let role = told.get("role").and_then(Value::as_str).ok_or("missing role of a message")?;
        let content = match told.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => {
                parts.iter().map(text_of_part).collect::<Result<_, _>>()?
            }
            _ => return Err("missing content of a message, which is text".into()),
        };
        let role = role.to_owned();
        told.insert("content".into(), content.as_str().into());
        Ok(Self { role, content, told })
    }
}

/// The text of a part of a content that is a list.
fn text_of_part(part: &Value) -> Result<&str, String> {
    let text = part.as_str().or_else(|| part["text"].as_str());
    text.ok_or_else(|| {
        let kind = part["type"].as_str().unwrap_or("an unknown type");
        format!("a message's content has a part of {kind}, but text alone is learnt")
    })
}

/// A conversation's text, and where its answers are, in bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ChatText {
    pub(crate) text: String,
    pub(crate) answers: Vec<Range<usize>>,
}

impl ChatText {
    /// Adds a piece, which is an answer or none.
    pub(crate) fn push(&mut self, piece: &str, is_answer: bool) {
        let start = self.text.len();
        self.text += piece;
        if is_answer {
            self.answers.push(start..self.text.len());
        }
    }
}
