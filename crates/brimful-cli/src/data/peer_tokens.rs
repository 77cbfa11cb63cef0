//! Comparison with `transformers`, if `make transformers` has installed it: for tokenizers of each kind, texts and
//! conversations become the same tokens, and answers are at the same places.

use std::env;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::chat_template::{ChatMessage, ChatTemplate};
use super::{SampleRequest, text};
use crate::tokenizer::Tokenizer;

/// Returns the Python that has `transformers`. If there is none, prints that the test is skipped.
fn python(test: &str) -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    let home = cache.join("brimful/transformers");
    if home.join("installed.txt").is_file() {
        return Some(home.join("bin/python"));
    }
    // Bypasses the test harness, which captures what is printed.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no transformers (make transformers)");
    None
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON")
}

fn numbers(list: &Value) -> Vec<i64> {
    list.as_array().expect("a list").iter().filter_map(Value::as_i64).collect()
}

#[test]
fn texts_and_conversations_become_the_tokens_that_transformers_makes_of_them() {
    let test = "texts_and_conversations_become_the_tokens_that_transformers_makes_of_them";
    let Some(python) = python(test) else { return };
    let folders = tempfile::tempdir().expect("a folder");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizers/make_tokenizers.py");
    let mut command = Command::new(python);
    command.arg(script).arg(folders.path());
    // Python makes no network requests, and does not load libraries from the compiler's path.
    command.env("HF_HUB_OFFLINE", "1").env_remove("LD_LIBRARY_PATH");
    let ended = command.output().expect("Python");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let mut found: Vec<_> = fs::read_dir(folders.path())
        .expect("folders")
        .map(|entry| entry.expect("a folder").path())
        .collect();
    found.sort();
    assert_eq!(found.len(), 10);
    found.iter().for_each(|folder| compare(folder));
}

/// Compares a folder's tokenizer with its reference.json.
fn compare(folder: &Path) {
    let reference = json(&folder.join("reference.json"));
    let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
    let tokenizer = Tokenizer::open(folder).expect("a tokenizer");
    for one in reference["texts"].as_array().expect("texts") {
        let text = one["text"].as_str().expect("a text");
        let tokens = tokenizer.encode(text).expect("tokens");
        assert_eq!(tokens, numbers(&one["ids"]), "{name}: {text:?}");
    }
    check_long(&name, &tokenizer, &reference["long"], folder);
    // The first template does not mark answers: they are located by the text that they add. The second template
    // marks them.
    for one in reference["talks"].as_array().expect("talks") {
        check_talk(&name, &tokenizer, one);
    }
    fs::copy(folder.join("marked.jinja"), folder.join("chat_template.jinja")).expect("copied");
    let tokenizer = Tokenizer::open(folder).expect("a tokenizer");
    for one in reference["talks"].as_array().expect("talks") {
        check_talk(&format!("{name}, marked"), &tokenizer, one);
    }
}

/// Compares a file that is read in several portions.
fn check_long(name: &str, tokenizer: &Tokenizer, long: &Value, folder: &Path) {
    let path = folder.join("long.txt");
    fs::write(&path, long["text"].as_str().expect("a text")).expect("written");
    let mut data = text::load(&path, 100, tokenizer).expect("data");
    let inputs = data.train.bring(&SampleRequest::plain(0..data.train.len())).expect("samples");
    let tokens: Vec<i64> = inputs.inputs.flatten(0, 1).try_into().expect("numbers");
    let expected = numbers(&long["ids"]);
    let differs = tokens.iter().zip(&expected).position(|(one, other)| one != other);
    assert_eq!(differs, None, "{name}: a long text");
    assert!(tokens.len() > expected.len() * 8 / 10, "{name}: {}", tokens.len());
}

fn check_talk(name: &str, tokenizer: &Tokenizer, talk: &Value) {
    let messages: Vec<ChatMessage> =
        serde_json::from_value(talk["messages"].clone()).expect("messages");
    let template = ChatTemplate::of(tokenizer);
    let marked = template.encode(&messages, tokenizer).expect("tokens");
    assert_eq!(marked.tokens, numbers(&talk["ids"]), "{name}: {messages:?}");
    let answers: Vec<i64> = marked.answers.iter().copied().map(i64::from).collect();
    assert_eq!(answers, numbers(&talk["answers"]), "{name}: {messages:?}");
}
