//! Command line of `brimful`: its commands, and the flags that all of them take.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};

use crate::command_line::{self, CommandLine};
use crate::commands::train::{self, TrainOptions};
use crate::commands::{
    completions, demo, doctor, evaluate, generate, man, plan, predict, report, verify,
};
use crate::exit::{CODES, Exit};
use crate::files::{self, FlagFile};
use crate::setting::words;

/// Trains batches and models that are bigger than your device's memory.
#[derive(Debug, Parser)]
#[command(name = "brimful", version, arg_required_else_help = true)]
#[command(after_help = format!("{EXAMPLES}\n\n{CODES}"))]
pub struct BrimfulArgs {
    /// Command.
    #[command(subcommand)]
    pub command: BrimfulCommand,
    /// Flags of all commands.
    #[command(flatten)]
    pub global: Global,
}

/// Help text of `--config`.
const CONFIG: &str = "Read flags from this TOML file; the command line overrides it";

/// Long help text of `--config`. It is a constant, because rustdoc would read `[train]` in a doc comment as a
/// link.
const CONFIG_LONG: &str = "Read flags from this TOML file; the command line overrides it. The file has a section for \
                           each command, such as [train], whose keys are the command's flags";

/// Flags of all commands.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Global")]
pub struct Global {
    /// Config file.
    #[arg(long, global = true, value_name = "FILE", help = CONFIG, long_help = CONFIG_LONG)]
    pub config: Option<PathBuf>,
    /// Print the library's log, and all causes of an error
    #[arg(long, global = true)]
    pub verbose: bool,
    /// Print no progress, only results and errors
    #[arg(long, global = true, conflicts_with = "verbose", hide_short_help = true)]
    pub quiet: bool,
    /// CPU threads of libtorch [default: one per core]
    #[arg(long, global = true, value_name = "N", value_parser = words::threads)]
    #[arg(hide_short_help = true)]
    pub threads: Option<usize>,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum BrimfulCommand {
    /// Check this machine: libtorch, CUDA, devices; and how to fix what is wrong.
    Doctor(doctor::DoctorOptions),
    /// Train on a mini-batch that does not fit: a plain step runs out of memory, micro-batches do not.
    #[command(after_help = "Examples:\n  brimful demo")]
    Demo,
    /// Train a model on data, in micro-batches, inside a memory limit.
    Train(Box<TrainOptions>),
    /// Classify samples with a trained model.
    Predict(predict::PredictOptions),
    /// Compute a model's loss, perplexity and accuracy on data.
    Evaluate(evaluate::EvaluateOptions),
    /// Generate text with a trained language model.
    Generate(generate::GenerateOptions),
    /// Predict the time, the bubble and the memory of a step before anything runs.
    Plan(Box<plan::PlanOptions>),
    /// Make a page of a run: timeline, memory, micro-batch sizes, loss and throughput.
    Report(report::ReportOptions),
    /// Compare the full batch's gradients with those of its micro-batches.
    Verify(verify::VerifyOptions),
    /// Print shell completions.
    Completions(completions::CompletionsOptions),
    /// Print the man page.
    Man(man::ManOptions),
}

impl BrimfulCommand {
    /// Lists the files that the command reads and writes.
    fn files(&self) -> Vec<FlagFile> {
        match self {
            Self::Train(options) => options.files(),
            Self::Predict(options) => options.files(),
            Self::Evaluate(options) => options.files(),
            Self::Plan(options) => options.files(),
            Self::Report(options) => options.files(),
            _ => Vec::new(),
        }
    }

    fn run(&self) -> Result<Exit> {
        match self {
            Self::Doctor(options) => doctor::run(options),
            Self::Demo => demo::run(),
            Self::Train(options) => train::run(options),
            Self::Predict(options) => predict::run(options),
            Self::Evaluate(options) => evaluate::run(options),
            Self::Generate(options) => generate::run(options),
            Self::Plan(options) => plan::run(options),
            Self::Report(options) => report::run(options),
            Self::Verify(options) => verify::run(options),
            Self::Completions(options) => completions::run(options),
            Self::Man(options) => man::run(options),
        }
    }

    /// Returns whether the command computes with libtorch's threads.
    fn computes(&self) -> bool {
        use BrimfulCommand::{Completions, Doctor, Man, Report};
        !matches!(self, Doctor(_) | Report(_) | Completions(_) | Man(_))
    }
}

const EXAMPLES: &str = "\
Examples:
  brimful demo                       train on a batch that does not fit
  brimful train --help               train a model on digits, images or text
  brimful train --config run.toml    with flags from a file
  brimful predict --help             classify samples
  brimful evaluate --help            loss, perplexity and accuracy on data
  brimful generate --help            generate text
  brimful plan --help                predict time and memory of a pipeline before it runs
  brimful report run.json            page of a run: timeline, memory, loss
  brimful verify --model gpt         compare gradients of full batch and micro-batches
  brimful doctor                     check this machine";

impl BrimfulArgs {
    /// Parses the command line of a training, `brimful train …`.
    ///
    /// # Errors
    /// Fails with clap's error, or if the words name another command.
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
        // `sleep_soon` restarts the program, which then reads the config file again. A config from a pipe can be
        // read only once, so with a pipe the program does not restart.
        if self.command.computes() && self.global.config.as_ref().is_none_or(|path| path.is_file())
        {
            command_line::sleep_soon(self.global.threads);
        }
        let mut files = self.command.files();
        files.extend(files::read("--config", self.global.config.as_ref()));
        files::check(&files)?;
        self.command.run()
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_holds_together() {
        BrimfulArgs::command().debug_assert();
    }

    /// Lists every command and subcommand.
    fn commands() -> Vec<clap::Command> {
        let mut found = vec![BrimfulArgs::command()];
        found[0].build();
        let mut next = 0;
        while let Some(command) = found.get(next) {
            let below: Vec<_> = command.get_subcommands().cloned().collect();
            found.extend(below);
            next += 1;
        }
        found
    }

    #[test]
    fn the_short_help_of_a_flag_is_one_line_that_begins_with_a_noun_or_a_verb() {
        for command in commands() {
            for flag in command.get_arguments() {
                let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
                let first = help.split_whitespace().next().unwrap_or_default();
                let is_filler = ["What", "Where", "How", "Who", "Of", "The"].contains(&first);
                let is_line = !help.contains('\n') && !first.is_empty() && help.len() <= 110;
                assert!(is_line && !is_filler, "{} {}: {help}", command.get_name(), flag.get_id());
            }
        }
    }

    #[test]
    fn the_short_help_of_a_training_fits_a_screen() {
        let mut commands = commands().into_iter();
        let train = commands.find(|command| command.get_name() == "train").expect("a command");
        let help = train.term_width(100).render_help().to_string();
        assert!(help.lines().count() <= 60, "{help}");
        for heading in ["Model:", "Data:", "Optimizer:", "Memory:", "Devices:", "Output:"] {
            assert!(help.contains(&format!("\n{heading}\n")), "{heading}");
        }
        assert!(help.contains("\n\nExamples:\n"), "{help}");
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
            // Earlier commands of the guide make the folders of models. Here `.`, which exists, stands for such a
            // folder.
            let folders = ["examples/tiny-llama", "tiny"];
            let there = |word| if folders.contains(&word) { "." } else { word };
            let words = ["brimful"].into_iter().chain(line.split_whitespace().map(there));
            let read = BrimfulArgs::command().try_get_matches_from(words);
            assert!(read.is_ok(), "brimful {line}: {:?}", read.err());
        }
    }
}
