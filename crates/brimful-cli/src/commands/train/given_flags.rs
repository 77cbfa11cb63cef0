//! Flags given to a run, which a resumed run takes over.

use std::collections::BTreeMap;

use brimful::save::Metadata;
use clap::error::Error;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::saved_weights::FLAGS;

/// Flags of one command line only: they say how the run starts, where it saves, and what it prints.
const NOT_TAKEN_OVER: [&str; 8] =
    ["config", "init", "init-partial", "overwrite", "quiet", "resume", "save", "verbose"];

/// Flags by name, each with its value as given.
#[derive(Debug, Clone, Default)]
pub(crate) struct GivenFlags(BTreeMap<String, String>);

impl GivenFlags {
    /// Adds the flags to a run's metadata, except those that the metadata has under their own names.
    pub(super) fn tell(&self, metadata: &mut Metadata) {
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
            // Groups of flags have ids too, but no values of their own.
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
    use super::*;
    use crate::commands::train::TrainOptions;
    use clap::CommandFactory;

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
