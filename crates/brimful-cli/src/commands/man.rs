//! `brimful man`: prints or writes the manual, as man pages.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::args::BrimfulArgs;
use crate::exit::{Exit, wrong_use};
use crate::output;
use crate::setting::words::did_you_mean;

/// Options of `brimful man`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  brimful man | man -l -                               page of the program
  brimful man train | man -l -                         page of a command
  brimful man --folder ~/.local/share/man/man1         a page for each command")]
pub struct ManOptions {
    /// Command whose page to print, such as train [default: the program]
    #[arg(value_name = "COMMAND", conflicts_with = "folder")]
    command: Vec<String>,
    /// Write a page for each command to this folder
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// Prints one page, or writes all of them.
pub fn run(options: &ManOptions) -> Result<Exit> {
    let mut root = BrimfulArgs::command();
    root.build();
    if let Some(folder) = &options.folder {
        let written = clap_mangen::generate_to(root, folder);
        written.with_context(|| format!("cannot write the pages into {}", folder.display()))?;
        return Ok(Exit::Done);
    }
    let mut page = Vec::new();
    Man::new(find(root, &options.command)?).render(&mut page)?;
    output::line(&String::from_utf8(page)?)?;
    Ok(Exit::Done)
}

/// Finds the command that this path of names leads to.
fn find(root: Command, names: &[String]) -> Result<Command> {
    names.iter().try_fold(root, |command, name| {
        command.find_subcommand(name).cloned().ok_or_else(|| {
            let known = command.get_subcommands().map(Command::get_name);
            let slip = did_you_mean(name, known);
            wrong_use(format!("{} has no command '{name}'{slip}", command.get_name()))
        })
    })
}
