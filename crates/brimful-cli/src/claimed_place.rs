//! Locks on files and folders that only one program at a time may write.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use brimful::save;

/// Locks a file until it is closed: two programs would mix up their lines.
pub(crate) fn claim(file: &File) -> Result<()> {
    let is_taken = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    ensure!(!is_taken, "another program writes it now: name another file");
    Ok(())
}

/// Lock on a path. The lock is a separate file, because every write replaces the file at the path.
#[derive(Debug)]
pub(crate) struct ClaimedPlace {
    path: PathBuf,
    /// Holds the lock while it is open.
    _file: File,
}

impl ClaimedPlace {
    pub(crate) fn of(path: &Path) -> Result<Self> {
        // Follows links: the lock lies beside the file that is really written.
        let path = save::place(path).context("it is no file")?;
        let name = path.file_name().context("it has no name")?.to_string_lossy();
        let path = path.with_file_name(format!(".{name}.lock"));
        loop {
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
            let file = file.context(
                "nothing can be written beside it; make its folder first, or name another",
            )?;
            claim(&file)?;
            // The last owner may have removed the lock file between opening and locking it.
            if is_at(&file, &path)? {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for ClaimedPlace {
    fn drop(&mut self) {
        // Removes the file while it is still locked. A file that stays behind does no harm: closed, it locks nothing.
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns whether the open file is the one at this path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_claimed_by_one_at_a_time_and_left_as_it_was() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.safetensors");
        let first = ClaimedPlace::of(&path).expect("free");
        let error = ClaimedPlace::of(&path).expect_err("taken").to_string();
        assert_eq!(error, "another program writes it now: name another file");
        ClaimedPlace::of(&folder.path().join("other.safetensors")).expect("another place");
        drop(first);
        drop(ClaimedPlace::of(&path).expect("free again"));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
        let link = folder.path().join("newest");
        std::os::unix::fs::symlink("model.safetensors", &link).expect("a link");
        let _first = ClaimedPlace::of(&link).expect("free");
        ClaimedPlace::of(&path).expect_err("taken under its own name");
    }

    #[test]
    fn what_a_killed_program_has_left_claims_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model");
        let _left = File::create(folder.path().join(".model.lock")).expect("a file");
        ClaimedPlace::of(&path).expect("free");
    }
}
