//! A conversation as tokens, in the form that the model's tokenizer knows.

use anyhow::Result;
use serde::Deserialize;

use crate::tokenizer::Tokenizer;

/// The role whose messages are answers.
const ANSWERS: &str = "assistant";
/// The tokens that begin and end a message in ChatML.
const CHAT_ML: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// What somebody says in a conversation.
#[derive(Debug, Deserialize)]
pub(super) struct ChatMessage {
    role: String,
    content: String,
}

/// Tokens, and which of them belong to answers.
#[derive(Debug, PartialEq)]
pub(super) struct MarkedTokens {
    pub(super) tokens: Vec<i64>,
    pub(super) answers: Vec<bool>,
}

/// How a conversation is written.
#[derive(Debug, Clone, Copy)]
pub(super) enum ChatTemplate {
    /// `<|role|>`, a line break, what is said, a line break; after an answer the token that ends a text.
    Plain,
    /// `<|im_start|>role`, a line break, what is said, `<|im_end|>`, a line break.
    ChatMl,
}

/// A message in writing.
struct Written {
    before: String,
    /// What a model has to say where the message is an answer: also that it is over.
    said: String,
    after: &'static str,
}

impl ChatTemplate {
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        match CHAT_ML.iter().all(|token| tokenizer.has(token)) {
            true => Self::ChatMl,
            false => Self::Plain,
        }
    }

    pub(super) fn encode(
        self,
        messages: &[ChatMessage],
        tokenizer: &Tokenizer,
    ) -> Result<MarkedTokens> {
        let mut marked = MarkedTokens { tokens: Vec::new(), answers: Vec::new() };
        for message in messages {
            let is_answer = message.role == ANSWERS;
            let Written { before, said, after } = self.write(message);
            // Each part by itself, so that no token is half an answer's.
            marked.add(tokenizer.encode(&before)?, false);
            marked.add(tokenizer.encode(&said)?, is_answer);
            if let (Self::Plain, true, Some(end)) = (self, is_answer, tokenizer.end()) {
                marked.add(vec![end], true);
            }
            marked.add(tokenizer.encode(after)?, false);
        }
        Ok(marked)
    }

    fn write(self, ChatMessage { role, content }: &ChatMessage) -> Written {
        let [start, end] = CHAT_ML;
        match self {
            Self::Plain => {
                Written { before: format!("<|{role}|>\n"), said: format!("{content}\n"), after: "" }
            }
            Self::ChatMl => Written {
                before: format!("{start}{role}\n"),
                said: format!("{content}{end}"),
                after: "\n",
            },
        }
    }
}

impl MarkedTokens {
    fn add(&mut self, tokens: Vec<i64>, are_answers: bool) {
        self.answers.resize(self.answers.len() + tokens.len(), are_answers);
        self.tokens.extend(tokens);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The conversation's text, and the answers in it.
    fn written(tokenizer: &Tokenizer) -> (String, String) {
        let message =
            |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
        let messages = [message("user", "hi"), message("assistant", "yo"), message("user", "so")];
        let template = ChatTemplate::of(tokenizer);
        let MarkedTokens { tokens, answers } =
            template.encode(&messages, tokenizer).expect("tokens");
        let learnt = tokens.iter().zip(answers).filter(|(_, is_answer)| *is_answer);
        let learnt: Vec<i64> = learnt.map(|(token, _)| *token).collect();
        let text = |tokens: &[i64]| tokenizer.decode(tokens).expect("text");
        (text(&tokens), text(&learnt))
    }

    #[test]
    fn without_a_form_of_its_own_a_conversation_is_written_plainly() {
        let all = "<|user|>\nhi\n<|assistant|>\nyo\n<|user|>\nso\n";
        assert_eq!(written(&Tokenizer::bytes()), (all.into(), "yo\n".into()));
        let ended = all.replace("yo\n", "yo\n~");
        let with_end = Tokenizer::bytes().with_end(Some(i64::from(b'~')));
        assert_eq!(written(&with_end), (ended, "yo\n~".into()));
    }

    #[test]
    fn a_tokenizer_with_the_tokens_of_chat_ml_has_it_written_so() {
        let words = r#"{"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
            "added_tokens": [
                {"id": 1, "content": "<|im_start|>", "single_word": false, "lstrip": false,
                 "rstrip": false, "normalized": false, "special": true},
                {"id": 2, "content": "<|im_end|>", "single_word": false, "lstrip": false,
                 "rstrip": false, "normalized": false, "special": true}],
            "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "<|im_start|>": 1,
            "<|im_end|>": 2, "user": 3, "assistant": 4, "hi": 5, "yo": 6, "so": 7}}}"#;
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("tokenizer.json"), words).expect("written");
        let tokenizer = Tokenizer::open(folder.path()).expect("a tokenizer");
        let all = "<|im_start|> user hi <|im_end|> <|im_start|> assistant yo <|im_end|> \
                   <|im_start|> user so <|im_end|>";
        assert_eq!(written(&tokenizer), (all.into(), "yo <|im_end|>".into()));
    }
}
