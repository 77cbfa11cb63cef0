//! Command line of a program: the module parses it, runs the command, reports an error in one line, and exits with
//! a code.

use std::env;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::process;

use anyhow::Result;
use brimful::memory;
use brimful_torch::libtorch;
use clap::{Arg, ArgAction, Command, Parser};

use crate::args::Global;
use crate::exit::{self, Exit, without_panic};
use crate::{config, output, progress};

/// Parsed command line of a program: a command and its flags.
pub trait CommandLine: Parser {
    /// Name of the program, at the beginning of its error messages.
    const PROGRAM: &'static str;

    /// Returns the flags that every command takes.
    fn global(&self) -> &Global;

    /// Runs the command.
    ///
    /// # Errors
    /// Fails with the command's error, which the caller prints.
    fn run(&self) -> Result<Exit>;
}

/// Parses the command line, runs its command and ends the process with its exit code.
pub fn run<C: CommandLine>() -> ! {
    let exit = match read::<C>(env::args_os().collect()) {
        Err(exit) => exit,
        Ok(line) => {
            memory::keep_freed_blocks();
            let outcome = prepare(line.global()).and_then(|()| without_panic(|| line.run()));
            ended::<C>(outcome, line.global().verbose)
        }
    };
    // An error here is not reported: `output::piece` has flushed and reported already.
    let _unread = io::stdout().flush();
    libtorch::exit_at_once(exit.code())
}

/// Parses the command line. If the words ask for help or are invalid, prints the help or the error, and returns
/// the exit code as an `Err`.
fn read<C: CommandLine>(words: Vec<OsString>) -> Result<C, Exit> {
    parse::<C>(words).map_err(|error| match error.downcast_ref::<clap::Error>() {
        Some(answer) => print(answer),
        None => ended::<C>(Err(error), false),
    })
}

/// Parses the command line, with the flags of its config file and of the run that it resumes.
fn parse<C: CommandLine>(words: Vec<OsString>) -> Result<C> {
    let matches = config::matches(taking_negative_numbers(C::command()), words)?;
    Ok(C::from_arg_matches(&matches)?)
}

/// Lets every flag take a negative number. Then the flag's value parser reports a wrong number; without this, clap
/// would call the number an unexpected argument.
fn taking_negative_numbers(command: Command) -> Command {
    let taking = |arg: Arg| match arg.get_action() {
        ArgAction::Set | ArgAction::Append => arg.allow_negative_numbers(true),
        _ => arg,
    };
    command.mut_args(taking).mut_subcommands(taking_negative_numbers)
}

/// Prints the requested help or the usage error.
fn print(answer: &clap::Error) -> Exit {
    let exit = if answer.use_stderr() { Exit::WrongUse } else { Exit::Done };
    match answer.print() {
        // A reader that closes the pipe early, as `head` does, has read enough.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Exit::Failed,
        _ => exit,
    }
}

/// Returns the exit code of an outcome, and prints its error if it has one.
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
    progress::print_log(global.verbose);
    if let Some(threads) = global.threads {
        tch::set_num_threads(threads.try_into().unwrap_or(i32::MAX));
    }
    exit::survive_file_limits()
}

/// Variable for the number of spins after which an idle thread sleeps, and its value: some ten microseconds.
const SPINS: (&str, &str) = ("GOMP_SPINCOUNT", "10000");
/// Other variables that set how idle threads wait.
const SAID: [&str; 2] = ["OMP_WAIT_POLICY", "KMP_BLOCKTIME"];

/// Restarts the program in this process with an environment in which libtorch's idle threads soon sleep. On a busy
/// machine, idle threads that spin take time from threads that compute. A restart is needed, because the OpenMP
/// library reads its variables when it is loaded, before `main`. Returns without a restart if the environment
/// already sets how threads wait, as it does after a restart, or allows only one thread. Also returns if the
/// restart fails.
pub(crate) fn sleep_soon(threads: Option<usize>) {
    let by_environment = || env::var_os("OMP_NUM_THREADS").is_some_and(|number| number == "1");
    let is_alone = threads.map_or_else(by_environment, |threads| threads == 1);
    if is_alone || SAID.iter().chain([&SPINS.0]).any(|name| env::var_os(name).is_some()) {
        return;
    }
    let mut words = env::args_os();
    if let (Some(name), Ok(program)) = (words.next(), env::current_exe()) {
        // If the restart fails, the program continues, but is slower on a busy machine.
        let _refused =
            process::Command::new(program).arg0(name).args(words).env(SPINS.0, SPINS.1).exec();
    }
}
