//! JSON objects, one per line or in an array, as sequences of tokens.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::chat_template::ChatTemplate;
use super::conversations::Conversations;
use super::portions::{self, Portion, TextCut};
use super::record::{ReadRecord, Record, TOGETHER, WANTED};
use super::text::{self, NumberWriter};
use super::{BYTE_ORDER_MARK, Dataset, JsonForm};
use crate::tokenizer::Tokenizer;

/// Number of objects of an array that are in memory at once.
const AT_ONCE: usize = 1024;

type Object = Map<String, Value>;

/// Loads a file of JSON objects. Documents are joined, each followed by the tokenizer's separator, and cut into
/// sequences. Each conversation is a separate sample.
pub(super) fn load(
    path: &Path,
    form: JsonForm,
    length: i64,
    tokenizer: &Tokenizer,
) -> Result<Dataset> {
    let mut kept = KeptRecords { length, vocabulary: tokenizer.vocabulary(), kind: Kind::None };
    match form {
        JsonForm::Lines => read_lines(path, tokenizer, &mut kept)?,
        JsonForm::Array => read_array(path, tokenizer, &mut kept)?,
    }
    kept.dataset(path, tokenizer)
}

fn read_lines(path: &Path, tokenizer: &Tokenizer, kept: &mut KeptRecords) -> Result<()> {
    let template = ChatTemplate::of(tokenizer);
    let place = |line: usize| format!("{}, line {line}", path.display());
    let read = |portion: &Portion| {
        let text = match portion.lines_before {
            0 => portion.text.trim_start_matches(BYTE_ORDER_MARK),
            _ => &portion.text,
        };
        let lines = text.lines().zip(portion.lines_before + 1..);
        let lines = lines.filter(|(line, _)| !line.trim().is_empty());
        let read = lines.map(|(line, number)| {
            let record = object_of(line).and_then(Record::of);
            let read = record.and_then(|record| record.encode(template, tokenizer));
            Ok((read.with_context(|| place(number))?, number))
        });
        read.collect::<Result<Vec<_>>>()
    };
    portions::each(path, TextCut::Lines, read, |records| {
        let mut records = records.into_iter();
        records.try_for_each(|(record, number)| kept.add(record).with_context(|| place(number)))
    })
}

/// Parses a line. The caller counts lines, so an error here names only the column.
fn object_of(line: &str) -> Result<Object> {
    ensure!(line.trim_start().starts_with('{'), WANTED);
    serde_json::from_str(line).map_err(|error| {
        let (column, error) = (error.column(), error.to_string());
        let reason = error.rsplit_once(" at line ").map_or(error.as_str(), |(reason, _)| reason);
        anyhow!("{WANTED}: {reason} at column {column}")
    })
}

fn read_array(path: &Path, tokenizer: &Tokenizer, kept: &mut KeptRecords) -> Result<()> {
    let shown = path.display();
    let template = ChatTemplate::of(tokenizer);
    let mut file =
        BufReader::new(File::open(path).with_context(|| format!("cannot read {shown}"))?);
    // Skips the byte order mark.
    if file.fill_buf()?.starts_with("\u{feff}".as_bytes()) {
        file.consume(BYTE_ORDER_MARK.len_utf8());
    }
    let (mut waiting, mut done, mut failed) = (Vec::new(), 0, None);
    let mut encode = |waiting: Vec<Object>| -> Result<()> {
        let encode = |object| Record::of(object)?.encode(template, tokenizer);
        for read in portions::in_parallel(waiting, portions::cores(), encode) {
            done += 1;
            let added = read.and_then(|record| kept.add(record));
            added.with_context(|| format!("{shown}, object {done}"))?;
        }
        Ok(())
    };
    let each = EachObject(|object| {
        waiting.push(object);
        if waiting.len() < AT_ONCE {
            return Ok(());
        }
        encode(std::mem::take(&mut waiting)).map_err(|error| failed = Some(error))
    });
    let mut json = serde_json::Deserializer::from_reader(&mut file);
    let read = json.deserialize_seq(each).and_then(|()| json.end());
    match failed {
        Some(error) => return Err(error),
        None => read.with_context(|| format!("{shown} is no array of JSON objects"))?,
    }
    encode(waiting)
}

/// Visitor that passes on the objects of an array one by one, until one fails.
struct EachObject<F>(F);

impl<'de, F: FnMut(Object) -> Result<(), ()>> Visitor<'de> for EachObject<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut objects: A) -> Result<(), A::Error> {
        while let Some(object) = objects.next_element()? {
            (self.0)(object).map_err(|()| A::Error::custom("it was left"))?;
        }
        Ok(())
    }
}

/// Samples read so far, on the disk. All are of one kind.
struct KeptRecords {
    length: i64,
    vocabulary: i64,
    kind: Kind,
}

enum Kind {
    None,
    Documents(NumberWriter),
    Conversations(Conversations),
}

impl KeptRecords {
    fn add(&mut self, record: ReadRecord) -> Result<()> {
        if matches!(self.kind, Kind::None) {
            self.kind = match record {
                ReadRecord::Document(_) => Kind::Documents(NumberWriter::new(self.vocabulary)?),
                ReadRecord::Conversation(_) => {
                    Kind::Conversations(Conversations::new(self.length)?)
                }
            };
        }
        match (&mut self.kind, record) {
            (Kind::Documents(documents), ReadRecord::Document(tokens)) => documents.append(&tokens),
            (Kind::Conversations(conversations), ReadRecord::Conversation(marked)) => {
                conversations.push(marked)
            }
            _ => bail!(TOGETHER),
        }
    }

    fn dataset(self, path: &Path, tokenizer: &Tokenizer) -> Result<Dataset> {
        let Self { length, vocabulary, kind } = self;
        let documents = match kind {
            Kind::Conversations(conversations) => return conversations.dataset(path, vocabulary),
            Kind::Documents(documents) => documents,
            Kind::None => NumberWriter::new(vocabulary)?,
        };
        text::of_tokens(documents.finish()?, path, length, tokenizer)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tch::Tensor;

    use super::super::Examples;
    use super::*;

    fn load_lines(lines: &str, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data.jsonl");
        fs::write(&path, lines).expect("written");
        load(&path, JsonForm::of(&path)?.expect("JSON"), length, tokenizer)
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
            ("{\"messages\": []}", "line 3: text and messages cannot be in one file"),
            ("{\"words\": \"ab\"}", "data.jsonl, line 3: it has neither \"text\" nor"),
        ] {
            let lines = format!("{{\"text\": \"ab\"}}\n\n{line}\n");
            let error = load_lines(&lines, 1, &Tokenizer::bytes()).expect_err(line);
            assert!(format!("{error:#}$").contains(complaint), "{error:#}");
        }
    }

    /// Reads a file, and returns the text of each sample and the part of it that is learnt.
    fn read_file(name: &str, content: &str) -> Result<Vec<[String; 2]>> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        fs::write(&path, content).expect("written");
        let tokenizer = Tokenizer::bytes().with_end(Some(i64::from(b'~')));
        let form = JsonForm::of(&path)?.context("plain text")?;
        let mut data = load(&path, form, 99, &tokenizer)?;
        let mut samples = Vec::new();
        for half in [&mut data.train, &mut data.test] {
            let Examples { inputs, targets, .. } = half.all()?;
            for row in 0..inputs.size()[0] {
                let text = tokenizer.decode(&Vec::<i64>::try_from(inputs.get(row))?)?;
                let learnt = tokenizer.decode(&Vec::<i64>::try_from(targets.get(row))?)?;
                samples.push([text.trim_end_matches('\0').to_owned(), learnt]);
            }
        }
        Ok(samples)
    }

    const TALK: [&str; 2] = ["<|user|>\nhi\n<|assistant|>\nyo\n", "yo\n~"];

    #[test]
    fn each_form_of_data_sets_becomes_a_conversation() {
        for (record, expected) in [
            (
                r#"{"messages": [{"role": "user", "content": "hi", "name": null}, {"role": "assistant", "content": "yo"}]}"#,
                TALK,
            ),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}, {"role": "assistant", "content": "yo"}]}"#,
                TALK,
            ),
            (
                r#"{"id": 7, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}"#,
                TALK,
            ),
            (r#"{"instruction": "hi", "input": "", "output": "yo", "text": null}"#, TALK),
            (
                r#"{"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "yo"}]}"#,
                TALK,
            ),
            (r#"{"prompt": "hi", "completion": " yo"}"#, ["hi yo", " yo~"]),
            (
                r#"{"instruction": "hi", "input": "so", "output": "yo", "system": "s"}"#,
                ["<|system|>\ns\n<|user|>\nhi\n\nso\n<|assistant|>\nyo\n", "yo\n~"],
            ),
            (
                r#"{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "s", "tools": "[]"}"#,
                ["<|system|>\ns\n<|user|>\nhi\n<|assistant|>\nyo\n", "yo\n~"],
            ),
            (
                r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "system": "s", "tools": []}"#,
                ["<|system|>\ns\n<|user|>\nhi\n<|assistant|>\nyo\n", "yo\n~"],
            ),
            (
                r#"{"messages": [{"role": "assistant", "content": "no", "weight": 0}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "weight": 1}]}"#,
                ["<|assistant|>\nno\n<|user|>\nhi\n<|assistant|>\nyo\n", "yo\n~"],
            ),
            (
                r#"{"conversations": [{"from": "gpt", "value": "no", "weight": 0.0}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}"#,
                ["<|assistant|>\nno\n<|user|>\nhi\n<|assistant|>\nyo\n", "yo\n~"],
            ),
        ] {
            let lines = read_file("chat.ndjson", &format!("{record}\n{record}\n"));
            assert_eq!(lines.expect(record), [expected; 2]);
            // An array on one line or on several, and JSON lines under any name.
            for (name, content) in [
                ("chat.json", format!("[{record}, {record}]")),
                ("chat.json", format!("\u{feff}\n[\n  {record},\n  {record}\n]\n")),
                ("chat", format!("[{record}, {record}]")),
                ("chat.json", format!("{record}\n{record}\n")),
                ("chat.txt", format!("{record}\n{record}\n")),
            ] {
                assert_eq!(read_file(name, &content).expect(record), [expected; 2], "{content}");
            }
        }
    }

    #[test]
    fn forms_that_are_not_read_are_named() {
        let talk = |part: &str| format!(r#"{{"messages": [{part}]}}"#);
        for (name, content, complaint) in [
            ("a.json", "{\n\"text\": \"ab\"\n}".into(), "a.json is one JSON object over several"),
            ("a.json", "[{\"text\": \"ab\"}, 7]".into(), "a.json is no array of JSON objects"),
            (
                "a.json",
                "[{\"text\": \"ab\"}, {\"x\": 1}]".into(),
                "a.json, object 2: it has neither",
            ),
            ("a.json", "some text".into(), "a.json, line 1: no JSON object"),
            (
                "a.jsonl",
                r#"{"chosen": "a", "rejected": "b"}"#.into(),
                "it has neither \"text\" nor",
            ),
            (
                "a.jsonl",
                r#"{"conversations": [{"from": "bing", "value": "x"}]}"#.into(),
                "has `from`: bing; it must be human, gpt or system",
            ),
            (
                "a.jsonl",
                talk(r#"{"role": "user", "content": [{"type": "image_url"}]}"#),
                "a part of image_url, but only text is supported",
            ),
            (
                "a.jsonl",
                r#"{"instruction": "a", "output": "b", "history": [["c", "d"]]}"#.into(),
                "its history is not read",
            ),
            ("a.jsonl", r#"{"prompt": "a", "completion": []}"#.into(), "are not both text"),
            (
                "a.jsonl",
                r#"{"prompt": "a", "completion": "b", "system": "c"}"#.into(),
                "its system is not read beside a prompt of text",
            ),
            (
                "a.jsonl",
                talk(r#"{"role": "system", "content": "a"}"#)
                    .replace("]}", "], \"system\": \"b\"}"),
                "it has system beside a message of system",
            ),
            (
                "a.jsonl",
                talk(r#"{"role": "user", "content": "a"}"#).replace("]}", "], \"tools\": [7]}"),
                "its tools are not read",
            ),
            (
                "a.jsonl",
                talk(r#"{"role": "gpt", "content": "a"}"#),
                "a message's role is gpt: known are system, user and assistant; make it assistant",
            ),
            (
                "a.jsonl",
                talk(r#"{"role": "assistant", "content": "a", "weight": 0.5}"#),
                "a message's weight is 0.5: give 0 or 1",
            ),
            (
                "a.jsonl",
                talk(r#"{"role": "assistant", "content": "a", "tool_calls": [{}]}"#),
                "a message has tool_calls, which a folder's chat template alone can write",
            ),
        ] {
            let error = format!("{:#}", read_file(name, &content).expect_err(complaint));
            assert!(error.contains(complaint), "{error}");
        }
        for text in ["some text", "{curly}", "[Chapter 1]\n", "{\"key\": 1}"] {
            let error = read_file("book.txt", text).expect_err("text").to_string();
            assert_eq!(error, "plain text", "{text}");
        }
    }
}
