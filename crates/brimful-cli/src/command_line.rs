//! From a command line to an exit code: reads it, runs one command, says what went wrong in a line.

use std::env;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::process::ExitCode;

use anyhow::Result;
use brimful::memory;
use clap::{Arg, ArgAction, Command, Parser};

use crate::args::Global;
use crate::exit::{Exit, without_panic};
use crate::{config, interrupt, log, output, progress};

/// What a program can be told.
pub trait CommandLine: Parser {
    /// The program's name, which its complaints begin with.
    const PROGRAM: &'static str;

    /// What can be said to every command.
    fn global(&self) -> &Global;

    /// Runs the command.
    ///
    /// # Errors
    /// With what went wrong, which is then said.
    fn run(&self) -> Result<Exit>;
}

/// Reads the command line and runs its command: all that a program does.
pub fn run<C: CommandLine>() -> ExitCode {
    match read::<C>(env::args_os().collect()) {
        Err(exit) => exit.into(),
        Ok(line) => {
            memory::keep_freed_blocks();
            let outcome = prepare(line.global()).and_then(|()| without_panic(|| line.run()));
            ended::<C>(outcome, line.global().verbose).into()
        }
    }
}

/// Reads the command line. What is wrong with it, and a cry for help, is answered on the spot.
fn read<C: CommandLine>(words: Vec<OsString>) -> Result<C, Exit> {
    parse::<C>(words).map_err(|error| match error.downcast_ref::<clap::Error>() {
        Some(answer) => print(answer),
        None => ended::<C>(Err(error), false),
    })
}

/// The command line, with the flags of the config that it names.
fn parse<C: CommandLine>(words: Vec<OsString>) -> Result<C> {
    let matches = config::matches(taking_negative_numbers(C::command()), words)?;
    Ok(C::from_arg_matches(&matches)?)
}

/// Lets every flag take a negative number, to be refused as a value of its own and not as a word too
/// many.
fn taking_negative_numbers(command: Command) -> Command {
    let taking = |arg: Arg| match arg.get_action() {
        ArgAction::Set | ArgAction::Append => arg.allow_negative_numbers(true),
        _ => arg,
    };
    command.mut_args(taking).mut_subcommands(taking_negative_numbers)
}

/// Prints the help that was asked for, or how the command line is wrong.
fn print(answer: &clap::Error) -> Exit {
    let exit = if answer.use_stderr() { Exit::WrongUse } else { Exit::Done };
    match answer.print() {
        // Who has read enough, as `head` has, was answered.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Exit::Failed,
        _ => exit,
    }
}

/// How it ended; what went wrong is said.
fn ended<C: CommandLine>(outcome: Result<Exit>, verbose: bool) -> Exit {
    outcome.unwrap_or_else(|error| {
        output::complain(C::PROGRAM, &error, verbose);
        Exit::of(&error)
    })
}

fn prepare(global: &Global) -> Result<()> {
    if global.quiet {
        progress::be_quiet();
    }
    log::listen(global.verbose);
    if let Some(threads) = global.threads {
        tch::set_num_threads(threads.try_into().unwrap_or(i32::MAX));
    }
    interrupt::survive_file_limits()
}
