//! A folder's own chat template in Jinja. The template writes the text of a conversation; this module locates the
//! answers in the text.
//!
//! A template may mark answers itself (`{% generation %}`). Otherwise an answer is the text that its message adds
//! after the generation prompt.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, anyhow, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::chat_message::{ChatMessage, ChatText};

const NAME: &str = "chat";
/// Marks of the start and end of an answer while a text is rendered: Unicode reserves both characters for internal
/// use, and messages that contain one are refused.
const MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];
/// Names of the blocks that the marks replace.
const BLOCKS: [&str; 2] = ["generation", "endgeneration"];
const REMEDY: &str =
    "mend it, or take it out: conversations are then written as for folders that have none";

/// A parsed template.
#[derive(Debug)]
pub(crate) struct JinjaTemplate {
    environment: Environment<'static>,
    place: String,
    /// Token that ends an answer; the model does not learn the text that a template writes after this token.
    end: Option<String>,
    /// True if the template marks answers itself.
    is_marked: bool,
}

impl JinjaTemplate {
    /// Parses the template found at `place`, with these tokens by name.
    pub(crate) fn new(place: &str, text: &str, tokens: &BTreeMap<String, String>) -> Result<Self> {
        let mut environment = Environment::new();
        // transformers renders templates with these two settings too.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |words: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, words))
        });
        for (name, token) in tokens {
            environment.add_global(name.clone(), token.clone());
        }
        let marked = with_marks(text);
        let is_marked = marked != text;
        let added = environment.add_template_owned(NAME, marked);
        added.map_err(|error| unreadable(place, &error))?;
        let end = tokens.get("eos_token").cloned();
        Ok(Self { environment, place: place.to_owned(), end, is_marked })
    }

    /// Writes the conversation's text, with the ranges of its answers.
    pub(crate) fn write(&self, messages: &[ChatMessage]) -> Result<ChatText> {
        let has_marks = |text: &str| text.contains(MARKS);
        ensure!(
            !messages.iter().any(|message| has_marks(&message.content)),
            "a message has U+FDD0 or U+FDD1, which are no characters of a text: take them out"
        );
        let text = self.render(messages, false)?;
        if self.is_marked {
            ensure!(
                !messages.iter().any(ChatMessage::is_unlearnt_answer),
                "a message has weight 0, but {} marks the answers that are learnt by itself: take the weight out, or \
                 the marks",
                self.place
            );
            return Ok(without_marks(&text));
        }
        let answers = self.answers(messages, &text)?;
        Ok(ChatText { text, answers })
    }

    /// Renders the conversation, with the generation prompt at its end if `asks` is true.
    fn render(&self, messages: &[ChatMessage], asks: bool) -> Result<String> {
        let told = |message: &ChatMessage| Value::from(Serde(&message.told));
        let messages: Vec<Value> = messages.iter().map(told).collect();
        // Templates test whether `tools` and `documents` are none.
        let none = || Value::from(());
        let given = context! {
            messages, tools => none(), documents => none(), add_generation_prompt => asks
        };
        let template = self.environment.get_template(NAME);
        let written = template.and_then(|template| template.render(given));
        written.map_err(|error| unreadable(&self.place, &error))
    }

    /// Locates the answers. An answer is the text that its message adds after the generation prompt.
    fn answers(&self, messages: &[ChatMessage], text: &str) -> Result<Vec<Range<usize>>> {
        let (mut answers, mut done) = (Vec::new(), 0);
        for (at, _) in messages.iter().enumerate().filter(|(_, message)| message.is_answer()) {
            let asked = self.render(&messages[..at], true)?;
            let answered = self.render(&messages[..=at], false)?;
            let added = answered.strip_prefix(&asked).filter(|_| text.starts_with(&answered));
            let added = added.filter(|_| done <= asked.len()).with_context(|| {
                let (place, number) = (&self.place, at + 1);
                format!(
                    "{place} writes message {number} differently if others follow it, so its answer cannot be \
                     located: put {{% generation %}} and {{% endgeneration %}} around answers in it, or take it out"
                )
            })?;
            done = asked.len() + self.said(added);
            answers.push(asked.len()..done);
        }
        Ok(answers)
    }

    /// Returns how many bytes of an answer the model learns: up to and including the answer's end token.
    fn said(&self, added: &str) -> usize {
        let end = self.end.as_deref().and_then(|end| Some(added.rfind(end)? + end.len()));
        end.unwrap_or(added.len())
    }
}

fn unreadable(place: &str, error: &Error) -> anyhow::Error {
    let line = error.line().map(|line| format!(", line {line}")).unwrap_or_default();
    let reason = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    anyhow!("{place}{line}: {reason}: {REMEDY}")
}

/// Replaces the blocks around answers, which Jinja does not know, by marks. Each mark is put between `if true` and
/// `endif`, so that Jinja trims white space around it as around any block.
fn with_marks(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, (inner, after))) = next_block(rest) {
        let name = inner.trim_matches(|c: char| c.is_whitespace() || "+-".contains(c));
        let sign = |sign: Option<char>| sign.filter(|sign| "+-".contains(*sign));
        let [left, right] = [sign(inner.chars().next()), sign(inner.chars().next_back())]
            .map(|sign| sign.map(String::from).unwrap_or_default());
        out += before;
        match BLOCKS.iter().position(|block| *block == name) {
            Some(at) => out += &format!("{{%{left} if true %}}{}{{% endif {right}%}}", MARKS[at]),
            None => out += &format!("{{%{inner}%}}"),
        }
        rest = after;
    }
    out + rest
}

/// Returns the text before the next block, the text within the block, and the text after the block.
fn next_block(text: &str) -> Option<(&str, (&str, &str))> {
    let (before, after) = text.split_once("{%")?;
    Some((before, after.split_once("%}")?))
}

/// Removes the marks from a text, and returns the text with the answers that were between marks.
fn without_marks(text: &str) -> ChatText {
    let ([begin, end], mut chat) = (MARKS, ChatText::default());
    for (at, piece) in text.split(begin).enumerate() {
        let (answer, rest) = match piece.split_once(end) {
            Some((answer, rest)) => (answer, rest),
            None if at > 0 => (piece, ""),
            None => ("", piece),
        };
        chat.push(answer, !answer.is_empty());
        chat.push(rest, false);
    }
    chat
}
