//! A folder that is written whole or not at all: beside its place, and renamed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use super::PretrainedError;
use super::json::{unreadable, unwritable};

/// Refuses a place that is taken by what `is_own` does not know: it would be lost.
///
/// # Errors
/// With the first name that is not known there.
pub(super) fn check_place(
    folder: &Path,
    is_own: impl Fn(&str) -> bool,
) -> Result<(), PretrainedError> {
    let occupied =
        |other: String| PretrainedError::Occupied { folder: folder.display().to_string(), other };
    if folder.is_file() {
        return Err(occupied("a file".into()));
    }
    if !folder.exists() {
        return Ok(());
    }
    let entries = fs::read_dir(folder).map_err(|reason| unreadable(folder, reason))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names.into_iter().find(|name| !is_own(name)).map_or(Ok(()), |other| Err(occupied(other)))
}

/// A folder beside its final place, removed unless it gets there.
#[derive(Debug)]
pub(super) struct FolderBeside {
    pub(super) path: PathBuf,
    target: PathBuf,
}

impl FolderBeside {
    pub(super) fn new(target: &Path) -> Result<Self, PretrainedError> {
        let path = beside(target, "part");
        // One that a killed run has left.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).map_err(|reason| unwritable(target, reason))?;
        Ok(Self { path, target: target.to_owned() })
    }

    /// Puts the folder in its place. What was there before goes when the new one is there.
    pub(super) fn replace(self) -> Result<(), PretrainedError> {
        let before = beside(&self.target, "before");
        let had_one = self.target.exists();
        if had_one {
            fs::rename(&self.target, &before).map_err(|reason| unwritable(&self.target, reason))?;
        }
        if let Err(reason) = fs::rename(&self.path, &self.target) {
            // Only if this fails too is the old one left beside its place.
            let _ = fs::rename(&before, &self.target);
            return Err(unwritable(&self.target, reason));
        }
        if had_one {
            // One that stays does no harm.
            let _ = fs::remove_dir_all(before);
        }
        Ok(())
    }
}

impl Drop for FolderBeside {
    fn drop(&mut self) {
        // After the rename there is nothing to remove, and that is fine.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// A name that nobody else writes to.
fn beside(target: &Path, mark: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.{}.{mark}", process::id()))
}
