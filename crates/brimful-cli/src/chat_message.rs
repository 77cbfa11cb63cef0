//! Messages of a conversation, and the text that a conversation becomes.

use std::ops::Range;

use serde::Deserialize;
use serde_json::{Map, Value};

/// Role whose messages are the model's answers.
pub(crate) const ANSWERS: &str = "assistant";

/// A message in a conversation.
#[derive(Debug, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
pub(crate) struct ChatMessage {
    pub(crate) role: String,
    pub(crate) content: String,
    /// False for a message of weight 0, which is only context: the model does not learn it.
    is_learnt: bool,
    /// All fields that the message has in the data, because chat templates may read any of them.
    pub(crate) told: Map<String, Value>,
}

impl ChatMessage {
    /// Makes a message with a role and a content alone.
    pub(crate) fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let (role, content) = (role.into(), content.into());
        let fields = [("role", &role), ("content", &content)];
        let told = fields.map(|(key, text)| (key.to_owned(), text.as_str().into()));
        Self { told: told.into_iter().collect(), role, content, is_learnt: true }
    }

    /// Sets the weight that the data give a message: 0 for a message that is only context, or 1.
    pub(crate) fn weighted(self, weight: Option<&Value>) -> Result<Self, String> {
        let is_learnt = match weight {
            None | Some(Value::Null) => true,
            Some(weight) if weight.as_f64() == Some(1.0) => true,
            Some(weight) if weight.as_f64() == Some(0.0) => false,
            Some(weight) => return Err(format!("a message's weight is {weight}: give 0 or 1")),
        };
        Ok(Self { is_learnt, ..self })
    }

    /// Returns whether the message is an answer that the model learns.
    pub(crate) fn is_answer(&self) -> bool {
        self.role == ANSWERS && self.is_learnt
    }

    /// Returns whether the message is an answer that is only context.
    pub(crate) fn is_unlearnt_answer(&self) -> bool {
        self.role == ANSWERS && !self.is_learnt
    }
}

impl TryFrom<Map<String, Value>> for ChatMessage {
    type Error = String;

    fn try_from(mut told: Map<String, Value>) -> Result<Self, String> {
        // Templates ask whether a field is present, so a null counts as absent.
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
        let weight = told.remove("weight");
        Self { role, content, told, is_learnt: true }.weighted(weight.as_ref())
    }
}

/// Returns the text of one part of a content that is a list of parts.
fn text_of_part(part: &Value) -> Result<&str, String> {
    let text = part.as_str().or_else(|| part["text"].as_str());
    text.ok_or_else(|| {
        let kind = part["type"].as_str().unwrap_or("an unknown type");
        format!("a message's content has a part of {kind}, but only text is supported")
    })
}

/// Text of a conversation, with the byte ranges of its answers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ChatText {
    pub(crate) text: String,
    pub(crate) answers: Vec<Range<usize>>,
}

impl ChatText {
    /// Appends a text, and records its range if it is an answer.
    pub(crate) fn push(&mut self, piece: &str, is_answer: bool) {
        let start = self.text.len();
        self.text += piece;
        if is_answer {
            self.answers.push(start..self.text.len());
        }
    }
}
