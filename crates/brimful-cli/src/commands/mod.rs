//! Commands of the program, one file each.

pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod evaluate;
pub(crate) mod generate;
pub(crate) mod man;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod report;
pub mod train;
pub(crate) mod verify;

use anyhow::Result;

use crate::args::BrimfulCommand;
use crate::exit::Exit;
use crate::files::FlagFile;

/// Lists the files that a command reads and writes.
pub(crate) fn files(command: &BrimfulCommand) -> Vec<FlagFile> {
    match command {
        BrimfulCommand::Train(options) => options.files(),
        BrimfulCommand::Predict(options) => options.files(),
        BrimfulCommand::Evaluate(options) => options.files(),
        BrimfulCommand::Plan(options) => options.files(),
        BrimfulCommand::Report(options) => options.files(),
        _ => Vec::new(),
    }
}

/// Runs one command.
pub(crate) fn run(command: &BrimfulCommand) -> Result<Exit> {
    match command {
        BrimfulCommand::Doctor(options) => doctor::run(options),
        BrimfulCommand::Demo => demo::run(),
        BrimfulCommand::Train(options) => train::run(options),
        BrimfulCommand::Predict(options) => predict::run(options),
        BrimfulCommand::Evaluate(options) => evaluate::run(options),
        BrimfulCommand::Generate(options) => generate::run(options),
        BrimfulCommand::Plan(options) => plan::run(options),
        BrimfulCommand::Report(options) => report::run(options),
        BrimfulCommand::Verify(options) => verify::run(options),
        BrimfulCommand::Completions(options) => completions::run(options),
        BrimfulCommand::Man(options) => man::run(options),
    }
}
