//! A file with a JSON object in each line, as sequences of tokens.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::chat_template::{ChatMessage, ChatTemplate};
use super::conversations::Conversations;
use super::{Dataset, text};
use crate::tokenizer::Tokenizer;

/// What of a line is read; there may be more.
#[derive(Debug, Deserialize)]
struct Line {
    text: Option<String>,
    messages: Option<Vec<ChatMessage>>,
}

/// Packs documents one after the other, each ended by the tokenizer's token for that; a conversation is a
/// sample by itself.
pub(super) fn load(path: &Path, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
    let read = text::read(path)?;
    let mut lines = ReadLines {
        tokenizer,
        template: ChatTemplate::of(tokenizer),
        documents: Vec::new(),
        conversations: Conversations::new(length),
    };
    for (index, line) in read.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        lines.add(line).with_context(|| format!("{}, line {}", path.display(), index + 1))?;
    }
    match lines.conversations.is_empty() {
        true => text::of_tokens(&lines.documents, path, length, tokenizer),
        false => lines.conversations.dataset(path, tokenizer.vocabulary()),
    }
}

/// The lines so far.
struct ReadLines<'a> {
    tokenizer: &'a Tokenizer,
    template: ChatTemplate<'a>,
    documents: Vec<i64>,
    conversations: Conversations,
}

impl ReadLines<'_> {
    fn add(&mut self, line: &str) -> Result<()> {
        let Line { text, messages } =
            serde_json::from_str(line).context("no JSON object with text or messages")?;
        match (text, messages) {
            (Some(text), None) if self.conversations.is_empty() => {
                self.documents.extend(self.tokenizer.encode(&text)?);
                self.documents.extend(self.tokenizer.separator()?);
            }
            (None, Some(messages)) if self.documents.is_empty() => {
                self.conversations.push(self.template.encode(&messages, self.tokenizer)?);
            }
            (None, None) => bail!("it has neither \"text\" nor \"messages\": give one of them"),
            _ => bail!("text and messages do not go together: give each a file of its own"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tch::Tensor;

    use super::*;

    fn load_lines(lines: &str, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data.jsonl");
        fs::write(&path, lines).expect("written");
        load(&path, length, tokenizer)
    }

    fn first(tokens: &Tensor) -> Vec<i64> {
        tokens.get(0).try_into().expect("numbers")
    }

    #[test]
    fn documents_follow_on_each_other_with_the_end_token_or_a_line_break_between_them() {
        let lines = "{\"text\": \"ab\", \"from\": 1}\n\n{\"text\": \"c\"}\n".repeat(20);
        let data = load_lines(&lines, 5, &Tokenizer::bytes().with_end(Some(7))).expect("data");
        assert_eq!(first(&data.train.inputs), [97, 98, 7, 99, 7]);
        assert_eq!(first(&data.train.targets), [98, 7, 99, 7, 97]);
        let data = load_lines(&lines, 5, &Tokenizer::bytes()).expect("data");
        assert_eq!(first(&data.train.inputs), [97, 98, 10, 99, 10]);
    }

    #[test]
    fn a_line_that_does_not_do_is_named() {
        for (line, complaint) in [
            ("{\"text\": \"ab\"", "data.jsonl, line 2: no JSON object with text or messages: EOF"),
            (
                "{\"text\": 7}",
                "data.jsonl, line 2: no JSON object with text or messages: invalid type",
            ),
            (
                "{\"messages\": [{\"role\": \"user\"}]}",
                "line 2: no JSON object with text or messages: missing",
            ),
            ("{\"messages\": []}", "line 2: text and messages do not go together"),
            ("{\"words\": \"ab\"}", "data.jsonl, line 2: it has neither \"text\" nor"),
        ] {
            let lines = format!("{{\"text\": \"ab\"}}\n{line}\n");
            let error = load_lines(&lines, 1, &Tokenizer::bytes()).expect_err(line);
            assert!(format!("{error:#}").contains(complaint), "{error:#}");
        }
    }
}
