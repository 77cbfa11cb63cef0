//! A JSON object as a sample, in the forms that data sets use.

use anyhow::{Result, anyhow, bail, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::chat_template::{ChatMessage, ChatTemplate, ChatText, MarkedTokens};
use crate::chat_message::ANSWERS;
use crate::tokenizer::Tokenizer;

pub(super) const WANTED: &str = "no JSON object with text or messages";
pub(super) const TOGETHER: &str =
    "text and messages cannot be in one file: give each a file of its own";
/// Keys that tell the known forms apart from other JSON.
const KEYS: [&str; 5] = ["text", "messages", "conversations", "prompt", "instruction"];
/// Speakers in ShareGPT's form, and their roles.
const SPEAKERS: [(&str, &str); 7] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", ANSWERS),
    ("chatgpt", ANSWERS),
    ("model", ANSWERS),
    (ANSWERS, ANSWERS),
    ("system", "system"),
];

/// Keys that change a conversation's text in other programs. This program cannot read them, so it refuses
/// conversations that have one.
const UNREAD: [&str; 3] = ["tools", "functions", "documents"];

/// A sample.
#[derive(Debug)]
pub(super) enum Record {
    /// A plain text.
    Document(String),
    Conversation(Vec<ChatMessage>),
    /// A given text and its continuation, which is learnt.
    Completion(ChatText),
}

/// Tokens of a sample.
#[derive(Debug)]
pub(super) enum ReadRecord {
    Document(Vec<i64>),
    Conversation(MarkedTokens),
}

/// A turn in ShareGPT's form.
#[derive(Deserialize)]
struct Turn {
    from: String,
    value: String,
    #[serde(default)]
    weight: Option<Value>,
}

/// An instruction in Alpaca's form.
#[derive(Deserialize)]
struct Instruction {
    instruction: String,
    #[serde(default)]
    input: Option<String>,
    output: String,
    #[serde(default)]
    history: Vec<Value>,
}

/// Prompt or completion: a text, or a list of messages.
#[derive(Deserialize)]
#[serde(untagged)]
enum Said {
    Text(String),
    Messages(Vec<ChatMessage>),
}

/// Returns whether an object has one of the known forms.
pub(super) fn is_record(told: &Map<String, Value>) -> bool {
    KEYS.iter().any(|key| told.contains_key(*key))
}

impl Record {
    /// Reads an object as a sample.
    pub(super) fn of(mut told: Map<String, Value>) -> Result<Self> {
        told.retain(|_, value| !value.is_null());
        let system = told.remove("system").filter(|system| !is_empty(system));
        let is_given = |key: &&str| told.get(*key).is_some_and(|value| !is_empty(value));
        let unread = UNREAD.into_iter().find(is_given);
        let record = match (told.remove("text"), told.remove("messages")) {
            (Some(_), Some(_)) => bail!(TOGETHER),
            (Some(text), None) => read(text).map(Self::Document),
            (None, Some(messages)) => read(messages).map(Self::Conversation),
            (None, None) if told.contains_key("conversations") => {
                shared(read(told["conversations"].take())?).map(Self::Conversation)
            }
            (None, None) if told.contains_key("prompt") && told.contains_key("completion") => {
                let [prompt, completion] = ["prompt", "completion"].map(|key| told[key].take());
                completed(read(prompt)?, read(completion)?)
            }
            (None, None) if told.contains_key("instruction") && told.contains_key("output") => {
                instructed(read(told.into())?).map(Self::Conversation)
            }
            (None, None) => bail!(
                "it has neither \"text\" nor \"messages\", nor \"conversations\", \"prompt\" with \"completion\", or \
                 \"instruction\" with \"output\": give one of them"
            ),
        }?;
        match (&record, unread) {
            (Self::Conversation(_) | Self::Completion(_), Some(key)) => bail!(
                "its {key} are not read: write them into its system message, as the model is to see them, and take \
                 {key} out"
            ),
            _ => record.with_system(system),
        }
    }

    /// Inserts the system message that some files have beside a conversation, and checks the roles.
    fn with_system(self, system: Option<Value>) -> Result<Self> {
        Ok(match (self, system) {
            (Self::Conversation(mut messages), system) => {
                if let Some(system) = system {
                    let is_there = messages.iter().any(|message| message.role == "system");
                    ensure!(!is_there, "it has system beside a message of system: leave one out");
                    messages.insert(0, ChatMessage::new("system", read::<String>(system)?));
                }
                messages.iter().try_for_each(check_role)?;
                Self::Conversation(messages)
            }
            (Self::Completion(_), Some(_)) => bail!(
                "its system is not read beside a prompt of text: write it into the prompt, or give messages"
            ),
            (record, _) => record,
        })
    }

    pub(super) fn encode(
        self,
        template: ChatTemplate<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<ReadRecord> {
        Ok(match self {
            Self::Document(text) => {
                let mut tokens = tokenizer.encode(&text)?;
                // A tokenizer may add the end token by itself.
                if tokenizer.end().is_none() || tokens.last().copied() != tokenizer.end() {
                    tokens.extend(tokenizer.separator()?);
                }
                ReadRecord::Document(tokens)
            }
            Self::Conversation(messages) => {
                ReadRecord::Conversation(template.encode(&messages, tokenizer)?)
            }
            Self::Completion(text) => {
                ReadRecord::Conversation(MarkedTokens::of_text(&text, tokenizer)?)
            }
        })
    }
}

/// Parses a value; the caller adds its place to the error.
fn read<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).map_err(|error| anyhow!("{WANTED}: {error}"))
}

/// Returns whether a value is empty, as in a column that only some rows fill.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty() || text == "[]",
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Refuses a role that is a speaker's name in ShareGPT's form, such as `gpt`. The model would not learn the
/// answers of such a role.
fn check_role(message: &ChatMessage) -> Result<()> {
    let known = SPEAKERS.iter().find(|(speaker, _)| *speaker == message.role);
    match known.filter(|(speaker, role)| speaker != role) {
        Some((speaker, role)) => {
            bail!(
                "a message's role is {speaker}: known are system, user and {ANSWERS}; make it {role}"
            )
        }
        None => Ok(()),
    }
}

fn shared(turns: Vec<Turn>) -> Result<Vec<ChatMessage>> {
    let message = |Turn { from, value, weight }: Turn| {
        let known = SPEAKERS.iter().find(|(speaker, _)| *speaker == from);
        let (_, role) = known.ok_or_else(|| {
            anyhow!(
                "in `conversations`, a message has `from`: {from}; it must be human, gpt or system"
            )
        })?;
        ChatMessage::new(*role, value).weighted(weight.as_ref()).map_err(|error| anyhow!(error))
    };
    turns.into_iter().map(message).collect()
}

fn instructed(told: Instruction) -> Result<Vec<ChatMessage>> {
    let Instruction { instruction, input, output, history } = told;
    ensure!(
        history.is_empty(),
        "its history is not read: write the whole conversation as \"messages\""
    );
    let asked = match input.filter(|input| !input.is_empty()) {
        Some(input) => format!("{instruction}\n\n{input}"),
        None => instruction,
    };
    Ok(vec![ChatMessage::new("user", asked), ChatMessage::new(ANSWERS, output)])
}

fn completed(prompt: Said, completion: Said) -> Result<Record> {
    match (prompt, completion) {
        (Said::Text(prompt), Said::Text(completion)) => {
            let mut text = ChatText::default();
            text.push(&prompt, false);
            text.push(&completion, true);
            Ok(Record::Completion(text))
        }
        (Said::Messages(prompt), Said::Messages(completion)) => {
            ensure!(
                !prompt.iter().any(ChatMessage::is_answer),
                "its prompt has an answer, which would be trained on too: write all of it as \"messages\""
            );
            Ok(Record::Conversation(prompt.into_iter().chain(completion).collect()))
        }
        _ => bail!("its prompt and its completion are not both text, nor both messages"),
    }
}
