//! One file a command.

pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod man;
pub(crate) mod plan;
pub(crate) mod report;
pub mod train;
pub(crate) mod verify;

use anyhow::Result;

use crate::args::Command;
use crate::exit::Exit;

/// Runs one command.
pub(crate) fn run(command: &Command) -> Result<Exit> {
    match command {
        Command::Doctor(options) => doctor::run(options),
        Command::Demo => demo::run(),
        Command::Train(options) => train::run(options),
        Command::Plan(options) => plan::run(options),
        Command::Report(options) => report::run(options),
        Command::Verify(options) => verify::run(options),
        Command::Completions(options) => completions::run(options),
        Command::Man(options) => man::run(options),
    }
}
