//! The program `brimful`.

#![forbid(unsafe_code)]

use brimful_cli::args::BrimfulArgs;
use brimful_cli::command_line;

fn main() {
    command_line::run::<BrimfulArgs>();
}
