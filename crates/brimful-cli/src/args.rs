//! The command line: what the program can do, and the flags that every command has.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::{bench, completions, doctor, man, plan, report, train, verify};
use crate::config;
use crate::exit::CODES;

/// Trains batches and models that are bigger than your device's memory.
#[derive(Debug, Parser)]
#[command(name = "brimful", version, arg_required_else_help = true)]
#[command(after_help = format!("{EXAMPLES}\n\n{CODES}"))]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Everywhere.
    #[command(flatten)]
    pub global: Global,
}

/// What can be said to every command.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Global {
    /// Take flags from this TOML file: a section for each command, such as [train] or
    /// [bench.micro], whose keys are its flags. The command line overrules it
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Show the library's log, and all causes of an error
    #[arg(long, global = true)]
    pub verbose: bool,
    /// Show results and errors alone: no progress
    #[arg(long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what this machine has, what is wrong with its set-up, and how to mend it.
    Doctor(doctor::Options),
    /// Train on a mini-batch that does not fit: a plain step runs out of memory, micro-batches do not.
    #[command(after_help = "Examples:\n  brimful demo")]
    Demo,
    /// Train a model on data, in micro-batches, inside a memory limit.
    Train(train::Options),
    /// Predict the time, the bubble and the memory of a step before anything runs.
    Plan(plan::Options),
    /// Make a page of a run: timeline, memory, sizes, loss and rate.
    Report(report::Options),
    /// Compare the full batch's gradients with those of its micro-batches.
    Verify(verify::Options),
    /// Measure speed and memory, side by side in one run.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Print what lets a shell complete commands and flags.
    Completions(completions::Options),
    /// Print the manual, as a man page.
    Man(man::Options),
}

const EXAMPLES: &str = "\
Examples:
  brimful demo                       a batch that does not fit, trained all the same
  brimful train --help               train a model on digits, images or text
  brimful train --config run.toml    the same, with flags from a file
  brimful plan --help                predict time and memory of a pipeline before it runs
  brimful report run.json            a page of what happened
  brimful verify --model gpt         full and split gradients, side by side
  brimful doctor                     what this machine has, and what is wrong with its set-up
  brimful bench pipeline             stages against one thread, beside what bubble and machine allow";

impl Args {
    /// Reads the command line, and the config that it names.
    ///
    /// # Errors
    /// With clap's own error, which may be a cry for `--help`, or with what is wrong in the config.
    pub fn read(words: Vec<OsString>) -> Result<Self> {
        let command = Self::command();
        let matches = config::matches(command, words)?;
        Ok(Self::from_arg_matches(&matches)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::builder::StyledStr;
    use std::collections::BTreeMap;

    /// Every command with its place, such as `bench micro`.
    fn commands() -> Vec<(String, clap::Command)> {
        let mut root = Args::command();
        root.build();
        let mut found = vec![(String::new(), root)];
        let mut next = 0;
        while let Some((place, command)) = found.get(next).cloned() {
            let below = command.get_subcommands().filter(|below| below.get_name() != "help");
            found.extend(
                below.map(|below| (format!("{place} {}", below.get_name()), below.clone())),
            );
            next += 1;
        }
        found
    }

    #[test]
    fn the_definition_holds_together() {
        Args::command().debug_assert();
    }

    #[test]
    fn commands_in_the_guide_and_the_readme_can_be_given() {
        let guide = include_str!("../../../guide/src/program.md");
        let readme = include_str!("../../../README.md");
        let line = |line: &'static str| {
            line.strip_prefix("brimful ")
                .or_else(|| line.strip_prefix("cargo run -p brimful-cli -- "))
        };
        let given: Vec<_> = guide.lines().chain(readme.lines()).filter_map(line).collect();
        assert!(given.len() > 10, "{given:?}");
        for line in given {
            let words = ["brimful"].into_iter().chain(line.split_whitespace());
            let read = Args::command().try_get_matches_from(words);
            assert!(read.is_ok(), "brimful {line}: {:?}", read.err());
        }
    }

    #[test]
    fn every_command_has_examples() {
        for (place, command) in commands() {
            let after = command.get_after_help().map(StyledStr::to_string).unwrap_or_default();
            let has_below = command.get_subcommands().next().is_some();
            assert!(after.starts_with("Examples:") || has_below, "brimful{place}");
        }
    }

    #[test]
    fn a_flag_is_called_and_explained_the_same_everywhere() {
        let mut known = BTreeMap::new();
        for (place, command) in commands() {
            for flag in command.get_arguments() {
                let name = flag.get_long().unwrap_or("help").to_owned();
                if name == "help" {
                    continue;
                }
                let help = flag.get_help().map(StyledStr::to_string).unwrap_or_default();
                let said = help.split([':', '[']).next().unwrap_or_default().trim();
                let said = (said.to_owned(), flag.get_short());
                let (first, before) =
                    known.entry(name.clone()).or_insert_with(|| (said.clone(), place.clone()));
                assert_eq!(*first, said, "--{name} of{before} and{place}");
            }
        }
    }
}
