//! Renamed flags. An old name on the command line fails with an error that gives the new one. Saved runs with old names
//! still load.

use std::ffi::OsString;

use anyhow::Result;
use clap::{Arg, Command};

use crate::exit::wrong_use;

/// Old and new names.
const RENAMED: [(&str, &str); 9] = [
    ("bus", "host-link"),
    ("follow-backward", "update-in-backward"),
    ("homes", "offload"),
    ("longest-wait", "timeout"),
    ("micro-batch", "micro-batch-size"),
    ("micro-batches", "num-micro-batches"),
    ("no-replay", "no-cuda-graphs"),
    ("patience", "heartbeat-timeout"),
    ("replay", "cuda-graphs"),
];

/// Returns the new name of a flag.
pub(super) fn new_name(old: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(name, _)| *name == old).map(|(_, new)| *new)
}

/// Returns the name that a flag had before.
pub(super) fn old_name(new: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(_, name)| *name == new).map(|(old, _)| *old)
}

/// Fails if a word is the old name of a flag. The error gives the new name.
pub(super) fn refuse_old_names(command: &Command, words: &[OsString]) -> Result<()> {
    let flags = words.iter().filter_map(|word| word.to_str()?.strip_prefix("--"));
    for old in flags.map(|flag| flag.split('=').next().unwrap_or(flag)) {
        if let Some(new) = new_name(old).filter(|_| !is_flag(command, old)) {
            return Err(wrong_use(format!("--{old} is called --{new} now")));
        }
    }
    Ok(())
}

/// Returns whether a command or one of its subcommands has this flag.
fn is_flag(command: &Command, name: &str) -> bool {
    command.get_arguments().any(|arg: &Arg| arg.get_long() == Some(name))
        || command.get_subcommands().any(|below| is_flag(below, name))
}
