//! A file with a JSON object in each line, as sequences of tokens.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Deserialize;

use super::chat_template::{ChatMessage, ChatTemplate, MarkedTokens};
use super::conversations::Conversations;
use super::number_file::NumberWriter;
use super::portions::{self, Portion, TextCut};
use super::{Dataset, text};
use crate::tokenizer::Tokenizer;

/// What some editors write before the first line: it says that UTF-8 follows, and belongs to no line.
const BYTE_ORDER_MARK: char = '\u{feff}';
const TOGETHER: &str = "text and messages do not go together: give each a file of its own";

/// What of a line is read; there may be more.
#[derive(Debug, Deserialize)]
struct Line {
    text: Option<String>,
    messages: Option<Vec<ChatMessage>>,
}

impl Line {
    /// Reads a line, which is counted elsewhere: of the place in it, the column alone says something.
    fn read(line: &str) -> Result<Self> {
        const WANTED: &str = "no JSON object with text or messages";
        ensure!(line.trim_start().starts_with('{'), WANTED);
        serde_json::from_str(line).map_err(|error| {
            let (column, error) = (error.column(), error.to_string());
            let reason =
                error.rsplit_once(" at line ").map_or(error.as_str(), |(reason, _)| reason);
            anyhow!("{WANTED}: {reason} at column {column}")
        })
    }
}

/// Packs documents one after the other, each ended by the tokenizer's token for that; a conversation is a
/// sample by itself.
pub(super) fn load(path: &Path, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
    let (template, vocabulary) = (ChatTemplate::of(tokenizer), tokenizer.vocabulary());
    let mut kept = KeptLines::None;
    let place = |line: usize| format!("{}, line {line}", path.display());
    let read = |portion: &Portion| {
        let text = match portion.lines_before {
            0 => portion.text.trim_start_matches(BYTE_ORDER_MARK),
            _ => &portion.text,
        };
        let lines = text.lines().zip(portion.lines_before + 1..);
        let lines = lines.filter(|(line, _)| !line.trim().is_empty());
        let read = lines.map(|(line, number)| {
            let read = ReadLine::new(line, template, tokenizer).with_context(|| place(number))?;
            Ok((read, number))
        });
        read.collect::<Result<Vec<_>>>()
    };
    portions::each(path, TextCut::Lines, read, |lines| {
        let mut lines = lines.into_iter();
        lines.try_for_each(|(line, number)| {
            kept.add(line, length, vocabulary).with_context(|| place(number))
        })
    })?;
    match kept {
        KeptLines::Conversations(conversations) => conversations.dataset(path, vocabulary),
        KeptLines::Documents(documents) => {
            text::of_tokens(documents.finish()?, path, length, tokenizer)
        }
        KeptLines::None => {
            text::of_tokens(NumberWriter::new(vocabulary)?.finish()?, path, length, tokenizer)
        }
    }
}

/// What a line holds.
#[derive(Debug)]
enum ReadLine {
    Document(Vec<i64>),
    Conversation(MarkedTokens),
}

impl ReadLine {
    fn new(line: &str, template: ChatTemplate<'_>, tokenizer: &Tokenizer) -> Result<Self> {
        let Line { text, messages } = Line::read(line)?;
        match (text, messages) {
            (Some(text), None) => {
                let mut tokens = tokenizer.encode(&text)?;
                tokens.extend(tokenizer.separator()?);
                Ok(Self::Document(tokens))
            }
            (None, Some(messages)) => template.encode(&messages, tokenizer).map(Self::Conversation),
            (None, None) => bail!("it has neither \"text\" nor \"messages\": give one of them"),
            (Some(_), Some(_)) => bail!(TOGETHER),
        }
    }
}

/// The lines so far, of one kind, on the disk.
enum KeptLines {
    None,
    Documents(NumberWriter),
    Conversations(Conversations),
}

impl KeptLines {
    fn add(&mut self, line: ReadLine, length: i64, vocabulary: i64) -> Result<()> {
        if matches!(self, Self::None) {
            *self = match line {
                ReadLine::Document(_) => Self::Documents(NumberWriter::new(vocabulary)?),
                ReadLine::Conversation(_) => Self::Conversations(Conversations::new(length)?),
            };
        }
        match (self, line) {
            (Self::Documents(documents), ReadLine::Document(tokens)) => documents.append(&tokens),
            (Self::Conversations(conversations), ReadLine::Conversation(marked)) => {
                conversations.push(marked)
            }
            _ => bail!(TOGETHER),
        }
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
        let train = |tokenizer| {
            let mut data = load_lines(&lines, 5, &tokenizer).expect("data");
            data.train.all().expect("samples")
        };
        let examples = train(Tokenizer::bytes().with_end(Some(7)));
        assert_eq!(first(&examples.inputs), [97, 98, 7, 99, 7]);
        assert_eq!(first(&examples.targets), [98, 7, 99, 7, 97]);
        assert_eq!(first(&train(Tokenizer::bytes()).inputs), [97, 98, 10, 99, 10]);
    }

    #[test]
    fn a_mark_before_the_first_line_and_line_ends_of_windows_are_no_text() {
        let plain = "{\"text\": \"ab\"}\n".repeat(20);
        let marked = format!("\u{feff}{}", plain.replace('\n', "\r\n"));
        let [plain, marked] = [plain, marked].map(|lines| {
            let mut data = load_lines(&lines, 2, &Tokenizer::bytes()).expect("data");
            data.train.all().expect("samples").inputs
        });
        assert_eq!(plain, marked);
    }

    #[test]
    fn a_line_that_does_not_do_is_named() {
        for (line, complaint) in [
            ("{\"text\": \"ab\"", "data.jsonl, line 3: no JSON object with text or messages: EOF"),
            ("{\"text\": \"ab\"", " while parsing an object at column 13$"),
            ("[\"ab\"]", "data.jsonl, line 3: no JSON object with text or messages$"),
            (
                "{\"text\": 7}",
                "data.jsonl, line 3: no JSON object with text or messages: invalid type",
            ),
            (
                "{\"messages\": [{\"role\": \"user\"}]}",
                "line 3: no JSON object with text or messages: missing",
            ),
            ("{\"messages\": []}", "line 3: text and messages do not go together"),
            ("{\"words\": \"ab\"}", "data.jsonl, line 3: it has neither \"text\" nor"),
        ] {
            let lines = format!("{{\"text\": \"ab\"}}\n\n{line}\n");
            let error = load_lines(&lines, 1, &Tokenizer::bytes()).expect_err(line);
            assert!(format!("{error:#}$").contains(complaint), "{error:#}");
        }
    }
}
