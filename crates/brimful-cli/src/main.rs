//! The program `brimful`: reads the command line, runs one command, says what went wrong in a line.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod config;
mod data;
mod exit;
mod interrupt;
mod log;
mod nearest;
mod output;
mod page;
mod progress;
mod setting;

use std::env;
use std::process::ExitCode;

use anyhow::Result;
use brimful::memory;

use args::{Args, Command, Global};
use exit::Exit;

fn main() -> ExitCode {
    match begin() {
        Err(exit) => exit.into(),
        Ok(args) => {
            memory::keep_freed_blocks();
            let outcome = prepare(&args.global).and_then(|()| run(&args.command));
            ended(outcome, args.global.verbose).into()
        }
    }
}

/// Reads the command line. What is wrong with it, and a cry for help, is answered on the spot.
fn begin() -> Result<Args, Exit> {
    let words = env::args_os().collect();
    Args::read(words).map_err(|error| match error.downcast_ref::<clap::Error>() {
        Some(answer) => print(answer),
        None => ended(Err(error), false),
    })
}

/// Prints the help that was asked for, or how the command line is wrong.
fn print(answer: &clap::Error) -> Exit {
    let exit = if answer.use_stderr() { Exit::WrongUse } else { Exit::Done };
    answer.print().map_or(Exit::Failed, |()| exit)
}

/// How it ended; what went wrong is said.
fn ended(outcome: Result<Exit>, verbose: bool) -> Exit {
    outcome.unwrap_or_else(|error| {
        output::complain(&error, verbose);
        Exit::of(&error)
    })
}

fn prepare(global: &Global) -> Result<()> {
    if global.quiet {
        progress::be_quiet();
    }
    log::listen(global.verbose);
    interrupt::survive_file_limits()
}

fn run(command: &Command) -> Result<Exit> {
    match command {
        Command::Doctor(options) => commands::doctor::run(options),
        Command::Demo => commands::demo::run(),
        Command::Train(options) => commands::train::run(options),
        Command::Plan(options) => commands::plan::run(options),
        Command::Report(options) => commands::report::run(options),
        Command::Verify(options) => commands::verify::run(options),
        Command::Bench(bench) => commands::bench::run(bench),
        Command::Completions(options) => commands::completions::run(options),
        Command::Man(options) => commands::man::run(options),
    }
}
