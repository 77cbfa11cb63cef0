//! What somebody says in a conversation.

use serde::Deserialize;

/// The role whose messages are answers.
const ANSWERS: &str = "assistant";

/// What somebody says in a conversation.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: String,
    pub(crate) content: String,
}

impl ChatMessage {
    /// Whether it is what a model has to say.
    pub(crate) fn is_answer(&self) -> bool {
        self.role == ANSWERS
    }
}
