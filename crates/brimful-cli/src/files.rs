//! Files and folders that a command reads and writes. This module alone decides whether an output may be written.
//! It refuses, before any work is done, an output that cannot be written, or that would overwrite an input,
//! another output or an earlier run's results.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use brimful::save;

use crate::exit::{ensure_use, wrong_use};
use crate::saved_weights::run_file;

/// Use of a file or folder by a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileUse {
    /// Reads a file or a folder.
    Reads,
    /// Writes a file.
    Writes,
    /// Writes a folder, which replaces an existing folder with all its content.
    WritesFolder,
}

/// A file or folder named by a flag.
#[derive(Debug, Clone)]
pub(crate) struct FlagFile {
    /// The flag as on the command line, such as `--save`.
    pub(crate) flag: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) purpose: FileUse,
    /// True if existing content must not be overwritten.
    pub(crate) is_new: bool,
}

/// Returns the file or folder that a flag names for reading, if given.
pub(crate) fn read(flag: &'static str, path: Option<impl Into<PathBuf>>) -> Option<FlagFile> {
    let purpose = FileUse::Reads;
    path.map(|path| FlagFile { flag, path: path.into(), purpose, is_new: false })
}

/// Returns the file or folder that `--data` names, if it exists. The name of shipped or synthetic data is no path,
/// so it conflicts with no output.
pub(crate) fn read_data(data: &str) -> Option<FlagFile> {
    read("--data", Some(data).filter(|data| Path::new(data).exists()))
}

/// Returns the file that a flag names for writing, if given. The file may have content, which is overwritten.
pub(crate) fn written(flag: &'static str, path: Option<impl Into<PathBuf>>) -> Option<FlagFile> {
    read(flag, path).map(|file| FlagFile { purpose: FileUse::Writes, ..file })
}

/// Refuses outputs that would overwrite other files, or cannot be written.
pub(crate) fn check(files: &[FlagFile]) -> Result<()> {
    let writes = || files.iter().filter(|file| file.purpose != FileUse::Reads);
    writes().try_for_each(FlagFile::check_place)?;
    for file in writes() {
        let mut others = files.iter().filter(|other| other.flag != file.flag);
        others.try_for_each(|other| file.check_beside(other))?;
    }
    writes().filter(|file| file.is_new).try_for_each(FlagFile::check_new)?;
    // The probes come last, so that a command that an earlier check refuses touches no file.
    writes().try_for_each(FlagFile::probe)
}

impl FlagFile {
    fn check_place(&self) -> Result<()> {
        if self.purpose == FileUse::WritesFolder {
            return Ok(());
        }
        let (flag, path, folder) = (self.flag, self.path.display(), folder_of(&self.path));
        ensure_use!(
            fs::metadata(folder).is_ok_and(|folder| folder.is_dir()),
            "{flag} {path}: there is no folder {}",
            folder.display()
        );
        ensure_use!(!self.path.is_dir(), "{flag} {path}: it is a folder: name a file");
        Ok(())
    }

    /// Refuses an output that is also an input or another output, that lies within one of these, or that is a
    /// folder around an input.
    fn check_beside(&self, other: &Self) -> Result<()> {
        let (Some(own), Some(others)) = (place(&self.path), place(&other.path)) else {
            return Ok(());
        };
        let (flag, path) = (self.flag, self.path.display());
        // A new file within a folder that is read conflicts with nothing.
        let is_taken = other.purpose != FileUse::Reads || own.exists();
        let is_in = own != others && own.starts_with(&others) && is_taken;
        // An input within a replaced folder conflicts. An output within a replaced folder is reported when that
        // output is checked.
        let is_replaced = self.purpose == FileUse::WritesFolder && other.purpose == FileUse::Reads;
        let is_around = own != others && others.starts_with(&own) && is_replaced;
        let hit = own == others || is_in || is_around;
        // A resumed run may overwrite the run that it resumes.
        let goes_on = ["--save", "--keep"].contains(&flag) && other.flag == "--resume";
        if !hit || (goes_on && own == others) {
            return Ok(());
        }
        Err(wrong_use(match other.purpose {
            FileUse::Reads => {
                format!("{flag} {path} would overwrite what {} reads: name another", other.flag)
            }
            FileUse::WritesFolder if is_in => {
                format!("{flag} {path} is in the folder that {} replaces: name another", other.flag)
            }
            _ => format!("{flag} and {} both write {path}: name a file for each", other.flag),
        }))
    }

    /// Refuses to overwrite existing content.
    fn check_new(&self) -> Result<()> {
        let Some(place) = place(&self.path) else { return Ok(()) };
        let is_empty = match fs::read_dir(&place) {
            Ok(mut entries) => entries.next().is_none(),
            Err(_) => fs::metadata(&place).map_or(true, |found| found.len() == 0),
        };
        let (flag, path) = (self.flag, self.path.display());
        let going_on = match flag {
            "--save" if run_file(&place).is_file() => format!("resume it by --resume {path}, "),
            _ => String::new(),
        };
        ensure_use!(
            is_empty,
            "{flag} {path} exists already: {going_on}name another, or give --overwrite"
        );
        Ok(())
    }

    /// Checks that the file can be written. The check leaves no traces on the disk.
    fn probe(&self) -> Result<()> {
        if self.purpose == FileUse::WritesFolder {
            return Ok(());
        }
        let (flag, path) = (self.flag, self.path.display());
        save::probe(&self.path).with_context(|| format!("{flag} {path} cannot be written"))
    }
}

/// Returns whether two paths name the same file or folder, existing or not. Paths such as `/dev/null` never do.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    place(one).is_some_and(|one| place(other) == Some(one))
}

/// Returns the canonical path of a file or folder, existing or not; none for paths that many programs may write
/// to, such as `/dev/null`.
fn place(path: &Path) -> Option<PathBuf> {
    let place = save::place(path)?;
    let there = fs::canonicalize(&place).ok();
    there.or_else(|| Some(fs::canonicalize(folder_of(&place)).ok()?.join(place.file_name()?)))
}

/// Returns the text of a file.
pub(crate) fn text_of(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the folder of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Locks a file until it is closed, because two programs that write to the file would mix up their lines.
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
        // Removes the lock file while it is still locked. If the removal fails, the file does no harm: once it is
        // closed, it locks nothing.
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns whether the open file is the file that this path names now.
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
