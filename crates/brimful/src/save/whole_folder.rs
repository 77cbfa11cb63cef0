//! Writes folders atomically: to a temporary folder beside the target, which is renamed.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::whole_file::{found_at, in_its_place, make_beside, place, refusal};
use crate::{Error, Result};

/// Calls `fill` with a new folder, which then replaces the target atomically. Keeps the target's permissions, and
/// links to it.
///
/// If the file system can exchange two folders, the target exists at all times. If it cannot, as on some network
/// file systems, the target is missing for an instant between two renames.
///
/// # Errors
/// With the error of `fill`, and when the file system refuses. The old folder, if there was one, is unchanged
/// then.
pub fn replace_folder<E: From<Error>>(
    target: impl AsRef<Path>,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let target = target.as_ref();
    let new = FolderBeside::new(target).map_err(|reason| refusal(target, &reason))?;
    fill(&new.path)?;
    Ok(new.replace().map_err(|reason| refusal(target, &reason))?)
}

/// Folder beside its target. A drop removes the new folder, or after an exchange the old one.
struct FolderBeside {
    path: PathBuf,
    target: PathBuf,
}

impl FolderBeside {
    fn new(target: &Path) -> io::Result<Self> {
        let before = found_at(target)?;
        let target = place(target).ok_or(io::ErrorKind::NotADirectory)?;
        if before.as_ref().is_some_and(|found| !found.is_dir()) {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let (path, ()) = make_beside(&target, |path| fs::create_dir(path))?;
        let new = Self { path, target };
        // A read-only folder could not be filled.
        if let Some(before) = before.filter(|before| !before.permissions().readonly()) {
            let _ = fs::set_permissions(&new.path, before.permissions());
        }
        Ok(new)
    }

    /// Syncs the folder to the disk, and renames it to its target.
    fn replace(self) -> io::Result<()> {
        sync_all(&self.path)?;
        in_its_place(&self.target, || match self.exchange() {
            Err(Errno::NOENT) => fs::rename(&self.path, &self.target),
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => self.replace_in_two(),
            exchanged => Ok(exchanged?),
        })
    }

    /// Exchanges the folder and its target atomically.
    fn exchange(&self) -> rustix::io::Result<()> {
        renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::EXCHANGE)
    }

    /// Replaces the target in two renames.
    fn replace_in_two(&self) -> io::Result<()> {
        // Renaming onto an empty folder replaces it.
        let (before, ()) = make_beside(&self.target, |path| fs::create_dir(path))?;
        if let Err(reason) = fs::rename(&self.target, &before) {
            let _ = fs::remove_dir(before);
            return Err(reason);
        }
        if let Err(reason) = fs::rename(&self.path, &self.target) {
            // If this fails too, the old folder stays beside the target.
            let _ = fs::rename(&before, &self.target);
            return Err(reason);
        }
        // A leftover folder does no harm.
        let _ = fs::remove_dir_all(before);
        Ok(())
    }
}

impl Drop for FolderBeside {
    fn drop(&mut self) {
        // Removes the old folder after an exchange, or the new one after a failure. There is nothing to remove
        // after a rename to a new target.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Syncs a folder and all its contents to the disk.
fn sync_all(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_all(&entry.path())?;
        } else if kind.is_file() {
            File::open(entry.path())?.sync_all()?;
        }
    }
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_renames_come_to_the_same() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("model");
        fs::create_dir(&target).expect("the old one");
        fs::write(target.join("old"), "old").expect("written");
        let new = FolderBeside::new(&target).expect("beside it");
        fs::write(new.path.join("new"), "new").expect("written");
        new.replace_in_two().expect("replaced");
        drop(new);
        let names = |folder: &Path| -> Vec<_> {
            let entries = fs::read_dir(folder).expect("a folder");
            entries.map(|entry| entry.expect("an entry").file_name()).collect()
        };
        assert_eq!(
            (names(&target), names(folder.path())),
            (vec!["new".into()], vec!["model".into()])
        );
    }
}
