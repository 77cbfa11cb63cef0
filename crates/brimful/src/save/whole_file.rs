//! A file that is written whole or not at all: beside its place, forced to the disk, and renamed.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{SaveError, unreadable};
use crate::{Error, Result};

/// Writes bytes in place of what the file held before, whole or not at all. Links to it and its permissions
/// stay. What is no plain file, as `/dev/stdout`, is written to as it is.
///
/// # Errors
/// When the file system refuses, with the remedy. The old file, if there was one, is then as before,
/// and nothing is left beside it.
pub fn replace(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let beside = WrittenFile::new(path.as_ref())?;
    (&beside.file).write_all(bytes).map_err(|reason| beside.refused(&reason))?;
    beside.replace()
}

/// Writes what is in another file in place of what the file held before, as [`replace`] does.
///
/// # Errors
/// As [`replace`], and when the other file cannot be read.
pub fn replace_by_copy(path: impl AsRef<Path>, other: impl AsRef<Path>) -> Result<()> {
    let other = other.as_ref();
    let mut source = File::open(other).map_err(|reason| unreadable(other, reason))?;
    let beside = WrittenFile::new(path.as_ref())?;
    io::copy(&mut source, &mut &beside.file).map_err(|reason| beside.refused(&reason))?;
    beside.replace()
}

/// A new file beside its final place, removed unless it gets there.
#[derive(Debug)]
pub struct WrittenFile {
    pub(crate) file: File,
    target: PathBuf,
    /// None where the target itself is written to, because it is no plain file.
    path: Option<PathBuf>,
}

impl WrittenFile {
    pub(crate) fn new(target: &Path) -> Result<Self> {
        Self::open(target).map_err(|reason| refusal(target, &reason))
    }

    fn open(target: &Path) -> io::Result<Self> {
        let before = fs::metadata(target).ok();
        if before.as_ref().is_some_and(|found| !found.is_file()) {
            let file = OpenOptions::new().write(true).truncate(true).open(target)?;
            return Ok(Self { file, target: target.to_owned(), path: None });
        }
        let target = behind_links(target);
        // One that is there already is somebody else's, or a way to elsewhere.
        let create = |path: &Path| OpenOptions::new().write(true).create_new(true).open(path);
        let (path, file) = make_beside(&target, create)?;
        let beside = Self { file, target, path: Some(path) };
        if let Some(before) = before {
            // Before anything is in it, which may not be for everyone's eyes. A file system without permissions
            // refuses.
            let _ = beside.file.set_permissions(before.permissions());
        }
        Ok(beside)
    }

    /// Puts the file in its place, on the disk and in the folder, before it returns.
    ///
    /// # Errors
    /// When the file system refuses: the old file is there then.
    pub fn replace(self) -> Result<()> {
        self.put().map_err(|reason| self.refused(&reason))
    }

    fn put(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        self.file.sync_all()?;
        in_its_place(&self.target, || fs::rename(path, &self.target))
    }

    /// The error of a write that the file system refused.
    pub(crate) fn refused(&self, reason: &io::Error) -> Error {
        refusal(&self.target, reason)
    }
}

impl Drop for WrittenFile {
    fn drop(&mut self) {
        // After the rename there is nothing to remove, and that is fine.
        let _ = self.path.as_ref().map(fs::remove_file);
    }
}

/// Lets `rename` put something in its place, and forces its folder to the disk.
pub(super) fn in_its_place(
    target: &Path,
    rename: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or(Path::new(".")))?;
    rename()?;
    // From here on the new one is in its place: nothing that fails now is a failed write.
    if let Err(error) = folder.sync_all() {
        tracing::warn!(
            place = %target.display(), %error,
            "it is written, but its folder could not be forced to the disk: should the machine fail now, \
             what was there before may come back"
        );
    }
    Ok(())
}

/// As many links as Linux follows.
const MOST_LINKS: usize = 40;

/// The place that a path leads to: links stay, and what is written is found through them.
pub(super) fn behind_links(path: &Path) -> PathBuf {
    let mut place = path.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(next) = fs::read_link(&place) else { break };
        place = place.with_file_name("").join(next);
    }
    place
}

/// Lets `make` make something new beside the target, under a name that nobody has: an earlier process of this
/// number may have left one behind.
pub(super) fn make_beside<T>(
    target: &Path,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = target.with_file_name(format!(".{name}.{}-{number}.part", process::id()));
        match make(&path) {
            Err(reason) if reason.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|made| (path, made)),
        }
    }
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
