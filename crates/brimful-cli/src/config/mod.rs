//! Flags from a TOML file. Each becomes a word of the command line, so that clap's definitions of the flags apply
//! to the file too.
//!
//! ```toml
//! [train]
//! model = "gpt"
//! batch-size = 512
//! stages = 4
//!
//! [plan]
//! stages = 4
//! ```
//!
//! These words are appended to the command line. A flag of the file is left out if the command line sets that flag
//! or a conflicting flag. `--json=false` on the command line leaves out the file's switch `json`. The flags of a
//! resumed run are appended after the flags of the file, by the same rules.

pub(crate) mod run_flags;
mod value;

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, Error};
use toml::de::{DeTable, DeValue};

use crate::exit::wrong_use;
use crate::files::text_of;
use crate::setting::words::nearest;

/// Flags that a file cannot set.
const NOT_IN_FILES: [&str; 3] = ["config", "help", "version"];

/// Parses the command line, together with the flags of the config file that it names and the flags of the run that
/// it resumes.
pub(crate) fn matches(mut command: Command, words: Vec<OsString>) -> Result<ArgMatches> {
    refuse_old_names(&command, &words)?;
    let (off, mut words): (Vec<OsString>, Vec<OsString>) =
        words.into_iter().partition(|word| switched_off(word).is_some_and(|n| has(&command, n)));
    // A required flag may come from a file, so only the last parse is strict.
    let look = |command: &Command, words: &[OsString]| {
        command.clone().ignore_errors(true).try_get_matches_from(words)
    };
    let is_on = |flag: &&Flag| off.iter().all(|word| switched_off(word) != Some(&flag.name));
    let mut looked = look(&command, &words)?;
    let path = looked.get_one::<PathBuf>("config").cloned();
    command.build();
    let program = command.get_name().to_owned();
    let text = path.as_deref().map(text_of).transpose()?.unwrap_or_default();
    let path = path.unwrap_or_default();
    let file = ConfigFile { program: &program, path: &path, text: &text };
    let flags = file.flags(&command, &looked)?;
    if !flags.is_empty() {
        words.extend(flags.iter().filter(is_on).map(|flag| flag.word.clone()));
        looked = look(&command, &words)?;
    }
    let of_run = run_flags::flags_of_run(&command, &looked);
    words.extend(of_run.iter().filter(is_on).map(|flag| flag.word.clone()));
    command.try_get_matches_from(words).map_err(|error| file.place(error, &flags))
}

/// Returns the name in `--name=false`.
fn switched_off(word: &OsString) -> Option<&str> {
    word.to_str()?.strip_prefix("--")?.strip_suffix("=false")
}

/// Returns whether a command or one of its subcommands has this switch.
fn has(command: &Command, name: &str) -> bool {
    let is_it =
        |arg: &Arg| arg.get_long() == Some(name) && matches!(arg.get_action(), ArgAction::SetTrue);
    command.get_arguments().any(is_it) || command.get_subcommands().any(|below| has(below, name))
}

/// Formats a TOML error as `line 3: expected a value`.
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
struct ConfigFile<'a> {
    /// Name of the program that reads the file.
    program: &'a str,
    path: &'a Path,
    text: &'a str,
}

/// A flag given in the file.
struct Flag {
    name: String,
    /// Word of the command line, such as `--micro-batch-size=16`.
    word: OsString,
    line: usize,
}

impl ConfigFile<'_> {
    /// Returns the file's flags for the command that runs. Checks the whole file.
    fn flags(&self, root: &Command, looked: &ArgMatches) -> Result<Vec<Flag>> {
        let table = DeTable::parse(self.text).map_err(|error| {
            let reason = line_and_reason(self.text, &error);
            wrong_use(format!("{} is not TOML: {reason}", self.path.display()))
        })?;
        let mut flags = Vec::new();
        self.section(root, table.get_ref(), Some(looked), &mut flags)?;
        Ok(flags)
    }

    /// Reads the section of a command, and the sections of its subcommands. `looked` holds the command's matches
    /// on the command line, or none if another command runs.
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
            let word = value::word(arg, value.get_ref()).map_err(|expected| {
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
        if let Some(new) = new_name(name).filter(|new| known.contains(new)) {
            return wrong_use(format!("{name} in {} is called {new} now", self.place_of(line)));
        }
        let place = format!("unknown {what} '{name}' in {}", self.place_of(line));
        wrong_use(match nearest(name, known) {
            Some(known) => format!("{place}: did you mean '{known}'?"),
            None => format!(
                "{place}: `{} --help` lists commands, and each has its own --help",
                self.program
            ),
        })
    }

    /// Adds the file and the line to clap's error about a flag from the file.
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

/// Lists the flags of a command that a file can set.
fn in_files(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_given = |arg: &&Arg| arg.get_long().is_some_and(|name| !NOT_IN_FILES.contains(&name));
    command.get_arguments().filter(is_given)
}

/// Returns whether the command line gives this flag, or a flag that conflicts with this flag.
fn is_overruled(command: &Command, arg: &Arg, looked: &ArgMatches) -> bool {
    let is_told = |arg: &&Arg| {
        let id = arg.get_id().as_str();
        // A subcommand's matches know only the subcommand's flags.
        looked.try_contains_id(id).is_ok()
            && looked.value_source(id) == Some(ValueSource::CommandLine)
    };
    let excludes = |a: &Arg, b: &Arg| {
        command.get_arg_conflicts_with(a).iter().any(|other| other.get_id() == b.get_id())
    };
    command
        .get_arguments()
        .filter(is_told)
        .any(|told| told.get_id() == arg.get_id() || excludes(told, arg) || excludes(arg, told))
}

/// Old and new names of the flags that were renamed.
const RENAMED: [(&str, &str); 9] = [
    ("bus", "host-link"),
    ("follow-backward", "update-in-backward"),
    ("homes", "offload"),
    ("longest-wait", "timeout"),
    ("micro-batch", "micro-batch-size"),
    ("micro-batches", "num-micro-batches"),
    ("no-replay", "no-cuda-graphs"),
    ("patience", "heartbeat-timeout"),
    ("replay", "cuda-graphs"),
];

/// Returns the new name of a renamed flag.
pub(super) fn new_name(old: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(name, _)| *name == old).map(|(_, new)| *new)
}

/// Returns the old name of a renamed flag.
pub(super) fn old_name(new: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(_, name)| *name == new).map(|(old, _)| *old)
}

/// Fails if a word is the old name of a flag. The error gives the new name.
pub(super) fn refuse_old_names(command: &Command, words: &[OsString]) -> Result<()> {
    let flags = words.iter().filter_map(|word| word.to_str()?.strip_prefix("--"));
    for old in flags.map(|flag| flag.split('=').next().unwrap_or(flag)) {
        if let Some(new) = new_name(old).filter(|_| !is_flag(command, old)) {
            return Err(wrong_use(format!("--{old} is called --{new} now")));
        }
    }
    Ok(())
}

/// Returns whether a command or one of its subcommands has this flag.
fn is_flag(command: &Command, name: &str) -> bool {
    command.get_arguments().any(|arg: &Arg| arg.get_long() == Some(name))
        || command.get_subcommands().any(|below| is_flag(below, name))
}
