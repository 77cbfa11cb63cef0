//! Files that a run reads besides its data, and files that it writes.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use clap::Args;

use super::checkpoints::kept_beside;
use crate::exit::ensure_use;
use crate::files::{self, FileUse, FlagFile};
use crate::log_files;
use crate::setting::words;

/// Files of a run.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub struct RunFiles {
    /// Save model, optimizer and progress after every epoch and when interrupted
    ///
    /// PATH is a safetensors file. When fine-tuning, PATH is a folder for the model, or with --lora for the adapter,
    /// unless PATH ends in .safetensors. Until the run is done, the folder also holds the file that --resume needs
    #[arg(long, value_name = "PATH")]
    pub(crate) save: Option<PathBuf>,
    /// Save every N steps too, while the next step runs
    #[arg(long, value_name = "N", value_parser = words::count, requires = "save")]
    #[arg(hide_short_help = true)]
    pub(crate) save_every: Option<usize>,
    /// Checkpoints to keep: the last; the last and the best; or the newest N
    ///
    /// `last` keeps the newest. `best` also keeps the one with the lowest test loss, as FILE.best. N keeps the newest N,
    /// as FILE.step-STEP
    #[arg(long, value_name = "last|best|N", default_value = "last", requires = "save")]
    #[arg(hide_short_help = true)]
    pub(crate) keep: Keep,
    /// Resume the run that --save has written, with its flags
    ///
    /// The resumed run saves to the same path. Flags of the command line override those of the run. With a fixed
    /// --micro-batch-size, the run ends with the same parameters as without the interruption
    #[arg(long, value_name = "PATH")]
    pub(crate) resume: Option<PathBuf>,
    /// Initialize the weights from this safetensors file, by name
    #[arg(long, value_name = "FILE", conflicts_with = "resume", hide_short_help = true)]
    pub(crate) init: Option<PathBuf>,
    /// Initialize only the weights that the file has in the same shape
    #[arg(long, requires = "init", hide_short_help = true)]
    pub(crate) init_partial: bool,
    /// Log each step to this CSV file, one line per step
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// Log each step to this folder, for TensorBoard
    #[arg(long, value_name = "FOLDER", hide_short_help = true)]
    pub(crate) events: Option<PathBuf>,
    /// Overwrite files that an earlier run wrote
    #[arg(long, hide_short_help = true)]
    pub(crate) overwrite: bool,
    /// Record the run in this file; `brimful report` makes a page from it
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) record: Option<PathBuf>,
    /// Write an HTML page: timeline, memory, micro-batch sizes, loss
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
}

impl RunFiles {
    /// Lists the given files, each with its flag; `--save` may name a folder.
    pub(super) fn flag_files(&self, saves_folder: bool) -> Vec<FlagFile> {
        let log = self.events.as_ref().map(|folder| log_files::events_file(folder));
        // A resumed run cuts its logs back to where it resumes, and overwrites its own files.
        let is_new = !self.overwrite && self.resume.is_none();
        let written = [
            files::written("--log", self.log.as_ref()),
            // A missing folder of events is created.
            files::written("--events", log.filter(|log| log.exists())),
            files::written("--record", self.record.as_ref()),
            files::written("--report", self.report.as_ref()),
        ];
        let written = written.into_iter().flatten().map(|file| FlagFile { is_new, ..file });
        let read = [
            files::read("--resume", self.resume.as_ref()),
            files::read("--init", self.init.as_ref()),
        ];
        let read = read.into_iter().flatten();
        self.saved_files(saves_folder).into_iter().chain(written).chain(read).collect()
    }

    /// Lists the files and folders that `--save` and `--keep` write.
    fn saved_files(&self, saves_folder: bool) -> Vec<FlagFile> {
        let Some(save) = &self.save else { return Vec::new() };
        let kept = kept_beside(save, self.keep);
        let goes_on = self.resume.as_ref().is_some_and(|from| {
            files::is_same(from, save) || kept.iter().any(|kept| files::is_same(from, kept))
        });
        let purpose = if saves_folder { FileUse::WritesFolder } else { FileUse::Writes };
        let is_new = !self.overwrite && !goes_on;
        let written = |flag, path| FlagFile { flag, path, purpose, is_new };
        let kept = kept.into_iter().map(|path| written("--keep", path));
        kept.chain([written("--save", save.clone())]).collect()
    }

    /// Refuses an `--events` path that is a file.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(path) = &self.events {
            let (shown, is_file) = (path.display(), path.exists() && !path.is_dir());
            ensure_use!(!is_file, "--events {shown} is a file: name a folder");
        }
        Ok(())
    }
}

/// Files kept beside that of the last save.
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
