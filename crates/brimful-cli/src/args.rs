//! Command line of `brimful`: its commands, and the flags that all of them take.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};

use crate::command_line::CommandLine;
use crate::commands::train::TrainOptions;
use crate::commands::{
    self, completions, doctor, evaluate, generate, man, plan, predict, report, verify,
};
use crate::exit::{CODES, Exit};
use crate::setting::words;
use crate::{files, idle_threads};

/// Trains batches and models that are bigger than your device's memory.
#[derive(Debug, Parser)]
#[command(name = "brimful", version, arg_required_else_help = true)]
#[command(after_help = format!("{EXAMPLES}\n\n{CODES}"))]
pub struct BrimfulArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: BrimfulCommand,
    /// Everywhere.
    #[command(flatten)]
    pub global: Global,
}

/// Help text of `--config`. It is a constant, because rustdoc would read `[train]` in a doc comment as a link.
const CONFIG: &str = "Take flags from this TOML file: a section for each command, such as [train], \
                      whose keys are its flags. The command line overrules it";

/// What can be said to every command.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Global {
    /// A file of flags.
    #[arg(long, global = true, value_name = "FILE", help = CONFIG)]
    pub config: Option<PathBuf>,
    /// Show the library's log, and all causes of an error
    #[arg(long, global = true)]
    pub verbose: bool,
    /// Show results and errors alone: no progress
    #[arg(long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Threads that libtorch computes with on a CPU [default: one a core]
    #[arg(long, global = true, value_name = "N", value_parser = words::threads)]
    pub threads: Option<usize>,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum BrimfulCommand {
    /// Say what this machine has, what is wrong with its set-up, and how to mend it.
    Doctor(doctor::DoctorOptions),
    /// Train on a mini-batch that does not fit: a plain step runs out of memory, micro-batches do not.
    #[command(after_help = "Examples:\n  brimful demo")]
    Demo,
    /// Train a model on data, in micro-batches, inside a memory limit.
    Train(Box<TrainOptions>),
    /// Tell what a trained model answers, sample by sample.
    Predict(predict::PredictOptions),
    /// Tell a model's loss, perplexity and accuracy on data.
    Evaluate(evaluate::EvaluateOptions),
    /// Write text with a trained GPT.
    Generate(generate::GenerateOptions),
    /// Predict the time, the bubble and the memory of a step before anything runs.
    Plan(Box<plan::PlanOptions>),
    /// Make a page of a run: timeline, memory, sizes, loss and rate.
    Report(report::ReportOptions),
    /// Compare the full batch's gradients with those of its micro-batches.
    Verify(verify::VerifyOptions),
    /// Print what lets a shell complete commands and flags.
    Completions(completions::CompletionsOptions),
    /// Print the manual, as a man page.
    Man(man::ManOptions),
}

impl BrimfulCommand {
    /// Returns whether the command computes with libtorch's threads.
    fn computes(&self) -> bool {
        use BrimfulCommand::{Completions, Doctor, Man, Report};
        !matches!(self, Doctor(_) | Report(_) | Completions(_) | Man(_))
    }
}

const EXAMPLES: &str = "\
Examples:
  brimful demo                       a batch that does not fit, trained all the same
  brimful train --help               train a model on digits, images or text
  brimful train --config run.toml    the same, with flags from a file
  brimful predict --help             what a trained model answers
  brimful evaluate --help            loss, perplexity and accuracy on data
  brimful generate --help            text by a trained GPT
  brimful plan --help                predict time and memory of a pipeline before it runs
  brimful report run.json            a page of what happened
  brimful verify --model gpt         full and split gradients, side by side
  brimful doctor                     what this machine has, and what is wrong with its set-up";

impl BrimfulArgs {
    /// Parses the command line of a training, `brimful train …`.
    ///
    /// # Errors
    /// Fails with clap's own error, or if the words are another command's.
    pub fn training<'a>(words: impl Iterator<Item = &'a str>) -> Result<TrainOptions> {
        match Self::try_parse_from(words)?.command {
            BrimfulCommand::Train(options) => Ok(*options),
            other => bail!("this is no training: {other:?}"),
        }
    }
}

impl CommandLine for BrimfulArgs {
    const PROGRAM: &'static str = "brimful";

    fn global(&self) -> &Global {
        &self.global
    }

    fn run(&self) -> Result<Exit> {
        // `sleep_soon` starts the program anew, which reads the config again; a pipe can be read only once.
        if self.command.computes() && self.global.config.as_ref().is_none_or(|path| path.is_file())
        {
            idle_threads::sleep_soon();
        }
        let mut files = commands::files(&self.command);
        files.extend(files::read("--config", self.global.config.as_ref()));
        files::check(&files)?;
        commands::run(&self.command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_holds_together() {
        BrimfulArgs::command().debug_assert();
    }

    #[test]
    fn commands_in_the_guide_and_the_readme_can_be_given() {
        let pages = [
            include_str!("../../../guide/src/program.md"),
            include_str!("../../../guide/src/program-train.md"),
            include_str!("../../../README.md"),
        ];
        let line = |line: &'static str| {
            let starts = ["brimful ", "cargo run -p brimful-cli -- "];
            starts.into_iter().find_map(|start| line.strip_prefix(start))
        };
        let given: Vec<_> = pages.into_iter().flat_map(str::lines).filter_map(line).collect();
        assert!(given.len() > 10, "{given:?}");
        for line in given {
            // Any existing folder stands for a model's folder, which the commands before it would have made.
            let folders = ["examples/tiny-llama", "tiny"];
            let there = |word| if folders.contains(&word) { "." } else { word };
            let words = ["brimful"].into_iter().chain(line.split_whitespace().map(there));
            let read = BrimfulArgs::command().try_get_matches_from(words);
            assert!(read.is_ok(), "brimful {line}: {:?}", read.err());
        }
    }
}
