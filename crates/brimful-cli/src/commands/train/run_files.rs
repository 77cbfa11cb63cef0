//! What a run reads besides its data, and what it leaves.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use clap::Args;

use crate::exit::ensure_use;
use crate::files::{self, FlagFile};
use crate::setting::words;

/// The files of a run.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Files")]
pub struct RunFiles {
    /// Write model, optimizer and progress to this safetensors file: after every epoch, and when
    /// interrupted; of a folder's model, the model alone to this folder, unless it ends in .safetensors
    #[arg(long, value_name = "FILE|FOLDER")]
    pub(crate) save: Option<PathBuf>,
    /// Write it after every so many steps too, while the next one runs
    #[arg(long, value_name = "STEPS", value_parser = words::count, requires = "save")]
    pub(crate) save_every: Option<usize>,
    /// What to keep beside it: last (nothing), best (the one with the lowest test loss, FILE with
    /// .best), or so many of the newest (FILE with .step-N)
    #[arg(long, value_name = "last|best|N", default_value = "last", requires = "save")]
    pub(crate) keep: Keep,
    /// Go on from such a file; with a given --micro-batch, to the same parameters as without the
    /// interruption
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Begin with the weights of this safetensors file, by their names
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub(crate) init: Option<PathBuf>,
    /// Take those that the model has in the same shape, and leave the others as they are
    #[arg(long, requires = "init")]
    pub(crate) init_partial: bool,
    /// Write a line for each step to this CSV file as it runs
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// Write what each step came to into this folder, for TensorBoard
    #[arg(long, value_name = "FOLDER")]
    pub(crate) events: Option<PathBuf>,
    /// Write what happened to this file, for brimful report
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Write a page that any browser opens: what happened
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
}

impl RunFiles {
    /// Those that were given, each with its flag.
    pub(super) fn flag_files(&self) -> Vec<FlagFile<'_>> {
        let files = [
            files::written("--save", self.save.as_ref()),
            files::written("--log", self.log.as_ref()),
            files::written("--record", self.record.as_ref()),
            files::written("--report", self.report.as_ref()),
            files::read("--resume", self.resume.as_ref()),
            files::read("--init", self.init.as_ref()),
        ];
        files.into_iter().flatten().collect()
    }

    /// Refuses a folder of events that is none.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(path) = &self.events {
            let (shown, is_file) = (path.display(), path.exists() && !path.is_dir());
            ensure_use!(!is_file, "--events {shown}: it is a file: name a folder");
        }
        Ok(())
    }
}

/// What is kept beside the file of the last save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    Last,
    Best,
    Newest(usize),
}

impl FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "last" => Ok(Self::Last),
            "best" => Ok(Self::Best),
            _ => words::counted(text, "give last, best, or a number from 1 on").map(Self::Newest),
        }
    }
}
