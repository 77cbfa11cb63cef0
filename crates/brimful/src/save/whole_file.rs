//! A file that is written whole or not at all: beside its place, forced to the disk, and renamed.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use super::SaveError;
use crate::{Error, Result};

/// Writes bytes in place of what the file held before, whole or not at all. What is no plain file,
/// as `/dev/stdout`, is written to as it is.
///
/// # Errors
/// When the file system refuses, with the remedy. The old file, if there was one, is then as before,
/// and nothing is left beside it.
pub fn replace(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let beside = Beside::new(path.as_ref())?;
    (&beside.file).write_all(bytes).map_err(|reason| beside.refused(&reason))?;
    beside.replace()
}

/// A new file beside its final place, removed unless it gets there.
pub(crate) struct Beside {
    pub(crate) file: File,
    target: PathBuf,
    /// None where the target itself is written to, because it is no plain file.
    path: Option<PathBuf>,
}

impl Beside {
    pub(crate) fn new(target: &Path) -> Result<Self> {
        let is_special = fs::metadata(target).is_ok_and(|found| !found.is_file());
        let path = (!is_special).then(|| beside(target)).transpose();
        let path = path.map_err(|reason| refusal(target, &reason))?;
        let mut options = OpenOptions::new();
        options.write(true).create(!is_special).truncate(true);
        let file = options.open(path.as_deref().unwrap_or(target));
        let file = file.map_err(|reason| refusal(target, &reason))?;
        Ok(Self { file, target: target.to_owned(), path })
    }

    /// Puts the file in its place, on the disk and in the folder, before it returns. After an error
    /// the old file is there.
    pub(crate) fn replace(self) -> Result<()> {
        self.put().map_err(|reason| self.refused(&reason))
    }

    fn put(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        self.file.sync_all()?;
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = File::open(folder.unwrap_or(Path::new(".")))?;
        fs::rename(path, &self.target)?;
        // From here on the new file is in its place: nothing that fails now is a failed write.
        if let Err(error) = folder.sync_all() {
            tracing::warn!(
                file = %self.target.display(), %error,
                "the file is written, but its folder could not be forced to the disk: should the \
                 machine fail now, the old file may come back"
            );
        }
        Ok(())
    }

    /// The error of a write that the file system refused.
    pub(crate) fn refused(&self, reason: &io::Error) -> Error {
        refusal(&self.target, reason)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // After the rename there is nothing to remove, and that is fine.
        let _ = self.path.as_ref().map(fs::remove_file);
    }
}

/// A name that nobody else writes to.
pub(super) fn beside(target: &Path) -> io::Result<PathBuf> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Ok(target.with_file_name(format!(".{name}.{}-{number}.part", process::id())))
}

pub(super) fn refusal(path: &Path, reason: &io::Error) -> Error {
    let remedy = match reason.kind() {
        io::ErrorKind::NotFound => "make its folder first",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room there, or write elsewhere"
        }
        io::ErrorKind::FileTooLarge => "raise the limit on file sizes, or write elsewhere",
        io::ErrorKind::IsADirectory => "name a file in it",
        _ => return unwritable(path, reason),
    };
    unwritable(path, format_args!("{reason}: {remedy}"))
}

pub(crate) fn unwritable(path: &Path, reason: impl Display) -> Error {
    SaveError::File {
        action: "write",
        path: path.display().to_string(),
        reason: reason.to_string(),
    }
    .into()
}
