//! The program `brimful`: reads the command line, runs one command, says what went wrong in a line.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod data;
mod output;
mod page;
mod setting;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match args.command {
        Command::Doctor(options) => commands::doctor::run(&options),
        Command::Demo => commands::demo::run(),
        Command::Train(options) => commands::train::run(&options),
        Command::Plan(options) => commands::plan::run(&options),
        Command::Verify(options) => commands::verify::run(&options),
        Command::Report(options) => commands::report::run(&options),
        Command::Bench(bench) => commands::bench::run(&bench),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            output::complain(&error);
            ExitCode::FAILURE
        }
    }
}
