//! A folder that is written whole or not at all: beside its place, and renamed.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::whole_file::{beside, refusal};
use crate::{Error, Result};

/// Lets `fill` write files into a new folder, which then takes the place of what was there before, whole or
/// not at all.
///
/// # Errors
/// That of `fill`, or when the file system refuses. The old folder, if there was one, is then as before.
pub fn replace_folder<E: From<Error>>(
    target: impl AsRef<Path>,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let target = target.as_ref();
    let new = FolderBeside::new(target).map_err(|reason| refusal(target, &reason))?;
    fill(&new.path)?;
    Ok(new.replace().map_err(|reason| refusal(target, &reason))?)
}

/// A folder beside its final place, removed unless it gets there.
struct FolderBeside {
    path: PathBuf,
    target: PathBuf,
}

impl FolderBeside {
    fn new(target: &Path) -> io::Result<Self> {
        let path = beside(target)?;
        fs::create_dir(&path)?;
        Ok(Self { path, target: target.to_owned() })
    }

    /// Puts the folder in its place. What was there before goes when the new one is there.
    fn replace(self) -> io::Result<()> {
        let before = beside(&self.target)?;
        let had_one = self.target.exists();
        if had_one {
            fs::rename(&self.target, &before)?;
        }
        if let Err(reason) = fs::rename(&self.path, &self.target) {
            // Only if this fails too is the old one left beside its place.
            let _ = fs::rename(&before, &self.target);
            return Err(reason);
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
