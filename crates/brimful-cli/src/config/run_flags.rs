//! Flags that a run stores in its file, and flags that a resumed run takes over from that file.

use std::collections::BTreeMap;
use std::path::PathBuf;

use brimful::internal::OpenedFile;
use brimful::save::Metadata;
use clap::error::Error;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::{Flag, in_files, is_overruled, old_name};
use crate::commands::train::{TrainOptions, place_of_run};
use crate::saved_weights::{EPOCH, FLAGS, run_file};

/// Lists the flags of the run that `--resume` names, except flags that the command line overrules. Sets `--save`
/// to the path that the run was saved to.
pub(super) fn flags_of_run(root: &Command, looked: &ArgMatches) -> Vec<Flag> {
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

/// Returns the options that a resumed run must share with the run that it resumes.
pub(crate) fn shared_metadata(options: &TrainOptions) -> Metadata {
    let told = shared(options).into_iter();
    told.filter_map(|(flag, text)| Some((flag.to_owned(), text?))).collect()
}

/// Lists the options that a resumed run must share, in the order of comparison. An option that was not given has
/// no value.
pub(crate) fn shared(options: &TrainOptions) -> [(&'static str, Option<String>); 19] {
    fn said(value: Option<impl ToString>) -> Option<String> {
        value.map(|value| value.to_string())
    }
    let recipe = &options.recipe;
    [
        ("accumulate", said((recipe.accumulate != 1).then_some(recipe.accumulate))),
        ("adapter", said(options.fine_tune.adapter.as_ref().map(|path| path.display()))),
        ("batch-size", said(Some(options.batch_size()))),
        ("batch-norm", said(options.batch_norm)),
        ("clip-norm", said(recipe.clip_norm)),
        ("data", said(Some(&options.data))),
        ("dtype", said(Some(options.dtype()))),
        ("ema", said(recipe.ema)),
        ("image", said(options.image)),
        ("learning-rate-decay", said(Some(recipe.learning_rate_decay))),
        ("lora", said(options.fine_tune.lora.as_ref())),
        ("model", said(Some(&options.model))),
        ("momentum", said(recipe.momentum)),
        ("optimizer", said(Some(recipe.optimizer))),
        ("optimizer-state", said(recipe.optimizer_state)),
        ("seed", said(Some(options.seed))),
        ("sequence", said(options.sequence)),
        ("warmup", said(recipe.warmup.filter(|steps| *steps != 0))),
        ("weight-decay", said(recipe.weight_decay)),
    ]
}

/// Shows a flag with its value, or that it was not given.
pub(crate) fn shown(flag: &str, text: Option<&str>) -> String {
    match text {
        Some(text) => format!("--{flag} {text}"),
        None => format!("no --{flag}"),
    }
}

/// Flags that a resumed run does not take over: they say how a run starts, where it saves, and what it prints.
const NOT_TAKEN_OVER: [&str; 8] =
    ["config", "init", "init-partial", "overwrite", "quiet", "resume", "save", "verbose"];

/// Flags that the command line gives, by name, each with its value as text.
#[derive(Debug, Clone, Default)]
pub(crate) struct GivenFlags(BTreeMap<String, String>);

impl GivenFlags {
    /// Adds the flags to a run's metadata, as one JSON text. Leaves out the flags that have their own entries in
    /// the metadata.
    pub(crate) fn tell(&self, metadata: &mut Metadata) {
        let mut flags = self.0.clone();
        flags.retain(|name, _| !metadata.contains_key(name));
        metadata.insert(FLAGS.into(), serde_json::json!(flags).to_string());
    }
}

impl FromArgMatches for GivenFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = matches.ids().filter_map(|id| {
            let is_given = matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
            let name = id.as_str().replace('_', "-");
            let values = matches.try_get_raw(id.as_str()).ok()??;
            let values = values.map(|value| value.to_str()).collect::<Option<Vec<_>>>()?;
            // clap's groups of flags have ids too, but their ids begin with a capital letter.
            let is_flag = name.starts_with(|first: char| first.is_ascii_lowercase());
            let is_taken_over = is_given && is_flag && !NOT_TAKEN_OVER.contains(&name.as_str());
            is_taken_over.then(|| (name, values.join(",")))
        });
        Ok(Self(given.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for GivenFlags {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::commands::train::TrainOptions;

    #[derive(clap::Parser)]
    struct Training {
        #[command(flatten)]
        options: TrainOptions,
    }

    #[test]
    fn every_flag_is_known_by_its_name() {
        for arg in Training::command().get_arguments() {
            let name = arg.get_id().as_str().replace('_', "-");
            assert!(arg.get_long().is_none_or(|long| long == name || name == "help"), "{name}");
        }
        for name in
            NOT_TAKEN_OVER.into_iter().filter(|name| !["config", "quiet", "verbose"].contains(name))
        {
            assert!(
                Training::command().get_arguments().any(|arg| arg.get_long() == Some(name)),
                "{name}"
            );
        }
    }

    #[test]
    fn what_was_given_is_reported_and_what_was_not_is_not() {
        let words = "train --epochs 3 -m 4 --json --save a --seed 7 --learning-rate=-0";
        let Training { options } = clap::Parser::parse_from(words.split(' '));
        let mut told = Metadata::from([("seed".into(), "7".into())]);
        options.given.tell(&mut told);
        let expected =
            r#"{"epochs":"3","json":"true","learning-rate":"-0","num-micro-batches":"4"}"#;
        assert_eq!(told[FLAGS], expected);
    }
}
