//! Flags of a resumed run, from its file.

use std::path::PathBuf;

use brimful::internal::OpenedFile;
use brimful::save::Metadata;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::{Flag, in_files, is_overruled, old_name};
use crate::commands::train::place_of_run;
use crate::saved_weights::{EPOCH, FLAGS, run_file};

/// Lists the flags of the run that `--resume` names, except those that the command line overrules. `--save` is the path
/// that the run was saved to.
pub(super) fn flags(root: &Command, looked: &ArgMatches) -> Vec<Flag> {
    let run =
        looked.subcommand().and_then(|(name, looked)| Some((root.find_subcommand(name)?, looked)));
    let Some((command, looked)) = run else { return Vec::new() };
    let Ok(Some(path)) = looked.try_get_one::<PathBuf>("resume") else { return Vec::new() };
    // A file that cannot be read is reported when the run is loaded.
    let Ok(file) = OpenedFile::open(run_file(path)) else { return Vec::new() };
    let mut told = file.metadata();
    // A file of weights without a run is refused when it is loaded.
    if !told.contains_key(EPOCH) {
        return Vec::new();
    }
    let given = told.remove(FLAGS).and_then(|flags| serde_json::from_str::<Metadata>(&flags).ok());
    told.extend(given.unwrap_or_default());
    let place = place_of_run(path, told.get("keep").map(String::as_str));
    told.insert("save".into(), place.to_string_lossy().into_owned());
    let said = in_files(command).filter(|arg| !is_overruled(command, arg, looked));
    said.filter_map(|arg| flag(arg, &told)).collect()
}

fn flag(arg: &Arg, told: &Metadata) -> Option<Flag> {
    let name = arg.get_long()?;
    let value = told.get(name).or_else(|| told.get(old_name(name)?))?;
    let word = match arg.get_action() {
        ArgAction::SetTrue => format!("--{name}"),
        _ => format!("--{name}={value}"),
    };
    Some(Flag { name: name.to_owned(), word: word.into(), line: 0 })
}
