//! Flags from a TOML file: turned into words of the command line, so that there is one list of flags.
//!
//! ```toml
//! [train]
//! model = "gpt"
//! batch-size = 512
//! stages = 4
//!
//! [bench.micro]
//! repeats = 3
//! ```
//!
//! The words go before those of the command line. One that the command line says otherwise, or that
//! cannot be beside what it says, is left out.

use std::any::TypeId;
use std::ffi::OsString;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, Error};
use toml::de::{DeTable, DeValue};

use crate::exit::wrong_use;
use crate::nearest::nearest;

/// The flags that no file gives.
const NOT_IN_FILES: [&str; 3] = ["config", "help", "version"];

/// Reads the command line, with the flags of the config that it names.
pub(crate) fn matches(mut command: Command, words: Vec<OsString>) -> Result<ArgMatches> {
    // What is missing may be in the file, so only the second look is a strict one.
    let looked = command.clone().ignore_errors(true).try_get_matches_from(&words)?;
    let Some(path) = looked.get_one::<PathBuf>("config") else {
        return Ok(command.try_get_matches_from(words)?);
    };
    let text = fs::read_to_string(path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    command.build();
    let file = File { path, text: &text };
    let flags = file.flags(&command, &looked)?;
    let added = flags.iter().map(|flag| flag.word.clone());
    let all = words.into_iter().chain(added);
    command.try_get_matches_from(all).map_err(|error| file.place(error, &flags))
}

/// `line 3: expected a value`, of a file that is not TOML or not what it should be.
pub(crate) fn line_and_reason(text: &str, error: &toml::de::Error) -> String {
    let reason = error.message().lines().collect::<Vec<_>>().join(", ");
    match error.span() {
        Some(span) => format!("line {}: {reason}", line_of(text, &span)),
        None => reason,
    }
}

fn line_of(text: &str, span: &Range<usize>) -> usize {
    text.bytes().take(span.start).filter(|byte| *byte == b'\n').count() + 1
}

/// A config file.
struct File<'a> {
    path: &'a Path,
    text: &'a str,
}

/// A flag that the file gives.
struct Flag {
    name: String,
    /// As on the command line: `--micro-batch=16`.
    word: OsString,
    line: usize,
}

impl File<'_> {
    /// What the file says to the command that is run. All of it is checked.
    fn flags(&self, root: &Command, looked: &ArgMatches) -> Result<Vec<Flag>> {
        let table = DeTable::parse(self.text).map_err(|error| {
            let reason = line_and_reason(self.text, &error);
            wrong_use(format!("{} is not TOML: {reason}", self.path.display()))
        })?;
        let mut flags = Vec::new();
        self.section(root, table.get_ref(), Some(looked), &mut flags)?;
        Ok(flags)
    }

    /// Reads the section of a command, and those of the commands below it. `looked` is what the
    /// command line says to it, where it is run.
    fn section(
        &self,
        command: &Command,
        table: &DeTable,
        looked: Option<&ArgMatches>,
        flags: &mut Vec<Flag>,
    ) -> Result<()> {
        for (key, value) in table {
            let (name, line) = (key.get_ref().as_ref(), line_of(self.text, &key.span()));
            if let (Some(below), DeValue::Table(table)) =
                (command.find_subcommand(name), value.get_ref())
            {
                let run = looked.and_then(|looked| looked.subcommand_matches(name));
                self.section(below, table, run, flags)?;
                continue;
            }
            let known = |arg: &&Arg| arg.get_long() == Some(name);
            let Some(arg) = in_files(command).find(known) else {
                return Err(self.unknown(command, name, line, value.get_ref()));
            };
            let word = word(arg, value.get_ref()).map_err(|expected| {
                wrong_use(format!("{}: {name} is {expected}", self.place_of(line)))
            })?;
            if let (Some(word), Some(looked)) = (word, looked)
                && !is_overruled(command, arg, looked)
            {
                flags.push(Flag { name: name.to_owned(), word: word.into(), line });
            }
        }
        Ok(())
    }

    fn unknown(
        &self,
        command: &Command,
        name: &str,
        line: usize,
        value: &DeValue,
    ) -> anyhow::Error {
        let (what, known): (_, Vec<&str>) = if value.is_table() {
            ("section", command.get_subcommands().map(Command::get_name).collect())
        } else {
            ("key", in_files(command).filter_map(Arg::get_long).collect())
        };
        let place = format!("unknown {what} '{name}' in {}", self.place_of(line));
        wrong_use(match nearest(name, known) {
            Some(known) => format!("{place}: did you mean '{known}'?"),
            None => {
                format!("{place}: `brimful --help` lists commands, and each has its own --help")
            }
        })
    }

    /// Says where a word stands that clap refuses.
    fn place(&self, error: Error, flags: &[Flag]) -> anyhow::Error {
        let Some(ContextValue::String(refused)) = error.get(ContextKind::InvalidArg) else {
            return error.into();
        };
        let refused = refused.split([' ', '=']).next().and_then(|word| word.strip_prefix("--"));
        match flags.iter().find(|flag| Some(flag.name.as_str()) == refused) {
            None => error.into(),
            Some(flag) => {
                let text = error.to_string();
                let reason = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
                wrong_use(format!("{}: {reason}", self.place_of(flag.line)))
            }
        }
    }

    fn place_of(&self, line: usize) -> String {
        format!("{} line {line}", self.path.display())
    }
}

/// The flags of a command that a file may give.
fn in_files(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_given = |arg: &&Arg| arg.get_long().is_some_and(|name| !NOT_IN_FILES.contains(&name));
    command.get_arguments().filter(is_given)
}

/// Whether the command line gives this flag, or one that cannot stand beside it.
fn is_overruled(command: &Command, arg: &Arg, looked: &ArgMatches) -> bool {
    let is_told = |arg: &Arg| {
        let source = looked.try_contains_id(arg.get_id().as_str()).is_ok_and(|there| there);
        source && looked.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
    };
    let excludes = |a: &Arg, b: &Arg| {
        command.get_arg_conflicts_with(a).iter().any(|other| other.get_id() == b.get_id())
    };
    let told = command.get_arguments().filter(|other| is_told(other));
    told.into_iter()
        .any(|other| other.get_id() == arg.get_id() || excludes(other, arg) || excludes(arg, other))
}

/// A key and its value as a word of the command line; none for a switch that is off. Fails with what
/// the value should be.
fn word(arg: &Arg, value: &DeValue) -> Result<Option<String>, String> {
    let name = arg.get_long().unwrap_or_default();
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        let is_on = value.as_bool().ok_or("true or false")?;
        return Ok(is_on.then(|| format!("--{name}")));
    }
    let text = match (arg.get_value_delimiter(), value.as_array()) {
        (Some(delimiter), Some(values)) => {
            let parts = values.iter().map(|value| scalar(arg, value.get_ref()));
            parts.collect::<Result<Vec<_>, _>>()?.join(&delimiter.to_string())
        }
        _ => scalar(arg, value)?,
    };
    Ok(Some(format!("--{name}={text}")))
}

/// A single value as the command line has it.
fn scalar(arg: &Arg, value: &DeValue) -> Result<String, String> {
    let taken = Taken::by(arg);
    match value {
        DeValue::String(text) if taken.text => Ok(text.to_string()),
        DeValue::Integer(number) if taken.whole_number => Ok(number.to_string()),
        DeValue::Float(number) if taken.number => Ok(number.to_string()),
        _ => Err(taken.in_words(arg)),
    }
}

/// What a flag takes, by the type that its words are read as.
struct Taken {
    text: bool,
    whole_number: bool,
    number: bool,
}

impl Taken {
    fn by(arg: &Arg) -> Self {
        let read_as = arg.get_value_parser().type_id();
        let is = |types: &[TypeId]| types.iter().any(|known| read_as == *known);
        let is_whole = is(&[
            TypeId::of::<usize>(),
            TypeId::of::<u64>(),
            TypeId::of::<u32>(),
            TypeId::of::<u16>(),
            TypeId::of::<i64>(),
        ]);
        let is_number = is(&[TypeId::of::<f64>()]);
        let is_text = is(&[TypeId::of::<String>(), TypeId::of::<PathBuf>()])
            || !arg.get_possible_values().is_empty();
        // A type of our own, such as bytes, is read from either.
        let is_ours = !is_whole && !is_number && !is_text;
        Self {
            text: is_text || is_ours,
            whole_number: is_whole || is_number || is_ours,
            number: is_number || is_ours,
        }
    }

    fn in_words(&self, arg: &Arg) -> String {
        let one = match self {
            Self { text: true, number: true, .. } => "a text or a number",
            Self { text: true, .. } => "a text, in quotes",
            Self { number: true, .. } => "a number",
            _ => "a whole number",
        };
        let list = if arg.get_value_delimiter().is_some() { ", or a list of them" } else { "" };
        format!("{one}{list}")
    }
}
