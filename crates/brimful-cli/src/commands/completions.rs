//! `brimful completions`: prints a shell's completion script.

use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::BrimfulArgs;
use crate::exit::Exit;
use crate::output;

/// Options of `brimful completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  brimful completions bash > ~/.local/share/bash-completion/completions/brimful
  brimful completions zsh > ~/.zfunc/_brimful          with ~/.zfunc on the fpath
  brimful completions fish > ~/.config/fish/completions/brimful.fish")]
pub struct CompletionsOptions {
    /// Shell
    shell: Shell,
}

/// Prints the completion script of a shell.
pub fn run(options: &CompletionsOptions) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut BrimfulArgs::command(), "brimful", &mut script);
    output::line(&String::from_utf8(script)?)?;
    Ok(Exit::Done)
}
