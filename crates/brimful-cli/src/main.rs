//! The program `brimful`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use brimful_cli::args::BrimfulArgs;
use brimful_cli::command_line;

fn main() -> ExitCode {
    command_line::run::<BrimfulArgs>()
}
