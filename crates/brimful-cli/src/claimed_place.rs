//! What one program at a time may write.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use brimful::save;

/// Claims a file for as long as it is open: the lines of two programs would be mixed up.
pub(crate) fn claim(file: &File) -> Result<()> {
    let is_taken = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    ensure!(!is_taken, "another program writes it now: name another file");
    Ok(())
}

/// The place of a file or folder that is written beside it and renamed: a file of its own says that it is
/// taken, because what has the place changes with every write.
#[derive(Debug)]
pub(crate) struct ClaimedPlace {
    path: PathBuf,
    /// Open as long as the place is claimed.
    _file: File,
}

impl ClaimedPlace {
    pub(crate) fn of(path: &Path) -> Result<Self> {
        // Through links: what is written is behind them.
        let path = save::place(path).context("it is no file")?;
        let name = path.file_name().context("it has no name")?.to_string_lossy();
        let path = path.with_file_name(format!(".{name}.lock"));
        loop {
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
            let file = file.context(
                "nothing can be written beside it; make its folder first, or name another",
            )?;
            claim(&file)?;
            // Whoever had the place before may have removed the file since it was opened.
            if is_at(&file, &path)? {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for ClaimedPlace {
    fn drop(&mut self) {
        // While it is locked. One that stays does no harm: it says nothing once it is closed.
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether the open file is the one that has this path.
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
