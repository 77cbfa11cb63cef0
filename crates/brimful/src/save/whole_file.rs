//! Writes files atomically: to a temporary file beside the target, which is synced to the disk and renamed.

use std::fmt::Display;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// Replaces a file's contents atomically. Keeps the file's permissions, and links to it. A target that is not a
/// regular file, and `/dev/stdout` wherever it leads, is written to directly.
///
/// # Errors
/// When the file system refuses; the error names the remedy. The old file, if there was one, is unchanged
/// then, and no temporary file is left.
pub fn replace(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let beside = WrittenFile::new(path.as_ref())?;
    (&beside.file).write_all(bytes).map_err(|reason| beside.refused(&reason))?;
    beside.replace()
}

/// Checks whether [`replace`] could begin to write, and leaves nothing behind.
///
/// # Errors
/// With the error of the file system.
pub fn probe(path: impl AsRef<Path>) -> io::Result<()> {
    WrittenFile::open(path.as_ref()).map(drop)
}

/// Replaces a file atomically with a copy of another, as [`replace`] does.
///
/// # Errors
/// As for [`replace`], and when the other file cannot be read.
pub fn replace_by_copy(path: impl AsRef<Path>, other: impl AsRef<Path>) -> Result<()> {
    let other = other.as_ref();
    let mut source = File::open(other).map_err(|reason| unreadable(other, reason))?;
    let beside = WrittenFile::new(path.as_ref())?;
    io::copy(&mut source, &mut &beside.file).map_err(|reason| beside.refused(&reason))?;
    beside.replace()
}

/// New file beside its target. A drop removes the file, unless it was renamed to the target.
#[derive(Debug)]
pub struct WrittenFile {
    pub(crate) file: File,
    target: PathBuf,
    /// `None` if the target itself is written to, because it is not a regular file.
    path: Option<PathBuf>,
}

impl WrittenFile {
    pub(crate) fn new(target: &Path) -> Result<Self> {
        Self::open(target).map_err(|reason| refusal(target, &reason))
    }

    fn open(target: &Path) -> io::Result<Self> {
        let Some(place) = place(target) else {
            let file = open_as_it_is(target)?;
            return Ok(Self { file, target: target.to_owned(), path: None });
        };
        let before = found_at(target)?;
        if before.as_ref().is_some_and(Metadata::is_dir) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        // Only a new file will do: an existing one may belong to others, or be a link to elsewhere.
        let create = |path: &Path| OpenOptions::new().write(true).create_new(true).open(path);
        let (path, file) = make_beside(&place, create)?;
        let beside = Self { file, target: place, path: Some(path) };
        if let Some(before) = before {
            // Set before anything is written, because the contents may be confidential. A file system without
            // permissions refuses, which does no harm.
            let _ = beside.file.set_permissions(before.permissions());
        }
        Ok(beside)
    }

    /// Renames the file to its target; file and folder are synced to the disk before it returns.
    ///
    /// # Errors
    /// When the file system refuses: the old file is unchanged then.
    pub fn replace(self) -> Result<()> {
        self.put().map_err(|reason| self.refused(&reason))
    }

    fn put(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        self.file.sync_all()?;
        in_its_place(&self.target, || fs::rename(path, &self.target))
    }

    /// Returns the error of a refused write.
    pub(crate) fn refused(&self, reason: &io::Error) -> Error {
        refusal(&self.target, reason)
    }
}

impl Drop for WrittenFile {
    fn drop(&mut self) {
        // After the rename there is nothing to remove, which is fine.
        let _ = self.path.as_ref().map(fs::remove_file);
    }
}

/// Runs `rename`, and syncs the target's folder to the disk.
pub(super) fn in_its_place(
    target: &Path,
    rename: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let folder = File::open(folder_of(target))?;
    rename()?;
    // From here on the new file is in place: a later failure is not a failed write.
    if let Err(error) = folder.sync_all() {
        tracing::warn!(
            place = %target.display(), %error,
            "it is written, but its folder could not be forced to the disk: should the machine fail now, \
             what was there before may come back"
        );
    }
    Ok(())
}

/// Returns the metadata of an existing file or folder. Fails if the system refuses to follow a link, such as
/// another user's link in `/tmp`.
pub(super) fn found_at(target: &Path) -> io::Result<Option<Metadata>> {
    match fs::metadata(target) {
        Err(reason) if reason.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Largest number of links that Linux follows.
const MOST_LINKS: usize = 40;

/// Follows links to the path at which [`replace`] and [`replace_folder`](super::replace_folder) put the new
/// file or folder, which need not exist. Returns `None` for targets that are written to directly: devices,
/// pipes, and open files of this process, such as `/dev/stdout`, wherever they lead.
pub fn place(path: impl AsRef<Path>) -> Option<PathBuf> {
    let place = behind_links(path.as_ref());
    let found = fs::metadata(&place);
    let is_replaced = found.map_or(true, |found| found.is_file() || found.is_dir());
    (is_replaced && open_number(&place).is_none()).then_some(place)
}

/// Follows links to their target, or to the name of an open file of this process.
fn behind_links(path: &Path) -> PathBuf {
    let mut place = path.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(next) = fs::read_link(&place) else { break };
        if open_number(&place).is_some() {
            break;
        }
        place = place.with_file_name("").join(next);
    }
    place
}

/// Returns the descriptor's number if the path is the name of an open file in `/proc/self/fd`.
fn open_number(path: &Path) -> Option<&str> {
    let folder = fs::canonicalize(path.parent()?).ok()?;
    let is_of_open = fs::canonicalize("/proc/self/fd").is_ok_and(|open| open == folder);
    path.file_name()?.to_str().filter(|_| is_of_open)
}

/// Opens a target that is written to directly. The standard streams are duplicated, because a file to which they
/// are redirected would be overwritten from its beginning if it were opened anew.
fn open_as_it_is(path: &Path) -> io::Result<File> {
    match open_number(&behind_links(path)) {
        Some("1") => Ok(io::stdout().as_fd().try_clone_to_owned()?.into()),
        Some("2") => Ok(io::stderr().as_fd().try_clone_to_owned()?.into()),
        _ => OpenOptions::new().append(true).open(path),
    }
}

/// Makes `path` a hard link to `file`, on the same file system, atomically: at any time `path` names the previous
/// file or the new one.
///
/// # Errors
/// When the file system refuses, as those without hard links do. The previous file is unchanged then.
pub fn replace_by_link(file: impl AsRef<Path>, path: impl AsRef<Path>) -> Result<()> {
    let (file, path) = (file.as_ref(), path.as_ref());
    let place = place(path).ok_or_else(|| unwritable(path, "it is no file"))?;
    let linked = make_beside(&place, |link| fs::hard_link(file, link)).and_then(|(link, ())| {
        let replaced = in_its_place(&place, || fs::rename(&link, &place));
        // Renaming two links to one file onto each other does nothing: the new link remains.
        let _ = fs::remove_file(&link);
        replaced
    });
    linked.map_err(|reason| refusal(path, &reason))
}

/// Removes temporary files that killed processes have left beside a path. Call it only while no process
/// writes there.
pub fn remove_left_over(path: impl AsRef<Path>) {
    let Some(place) = place(path) else { return };
    let Some(name) = place.file_name().map(|name| name.to_string_lossy().into_owned()) else {
        return;
    };
    let is_left_over = |found: &str| {
        let mark = found.strip_prefix('.')?.strip_prefix(&name)?.strip_prefix('.')?;
        let (process, number) = mark.strip_suffix(".part")?.split_once('-')?;
        let is_number = |text: &str| text.parse::<u64>().is_ok();
        (is_number(process) && is_number(number)).then_some(())
    };
    let Ok(entries) = fs::read_dir(folder_of(&place)) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_str().and_then(is_left_over).is_some() {
            let path = entry.path();
            // A file that cannot be removed does no harm.
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
        }
    }
}

/// Calls `make` with an unused path beside the target: an earlier process with this process's id may have left
/// files there.
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

pub(super) fn unwritable(path: &Path, reason: impl Display) -> Error {
    Error::File { action: "write", path: path.display().to_string(), reason: reason.to_string() }
}

pub(super) fn unreadable(path: &Path, reason: impl Display) -> Error {
    Error::File { action: "read", path: path.display().to_string(), reason: reason.to_string() }
}
