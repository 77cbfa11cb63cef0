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

/// The files of a run.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Files")]
pub struct RunFiles {
    /// Write model, optimizer and progress to this safetensors file: after every epoch, and when
    /// interrupted; of a folder's model, the model or its adapter to this folder, unless it ends in
    /// .safetensors, with what the run needs to go on beside it until it is done
    #[arg(long, value_name = "FILE|FOLDER")]
    pub(crate) save: Option<PathBuf>,
    /// Write it after every so many steps too, while the next one runs
    #[arg(long, value_name = "STEPS", value_parser = words::count, requires = "save")]
    pub(crate) save_every: Option<usize>,
    /// What to keep beside it: last (nothing), best (the one with the lowest test loss, FILE with
    /// .best), or so many of the newest (FILE with .step-N)
    #[arg(long, value_name = "last|best|N", default_value = "last", requires = "save")]
    pub(crate) keep: Keep,
    /// Go on from what --save has written, with the flags of that run, and save there again; flags that
    /// are given besides change them. With a given --micro-batch-size, it ends with the same parameters as
    /// without the interruption
    #[arg(long, value_name = "FILE|FOLDER")]
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
    /// Write over what is there already: another run's files, logs or folder
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Write what happened to this file, for brimful report
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Write a page that any browser opens: what happened
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
            ensure_use!(!is_file, "--events {shown}: it is a file: name a folder");
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
