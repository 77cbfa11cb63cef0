//! The files that a command reads and writes: what would overwrite another, or cannot be written, is
//! refused before any work is put into it.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::{Context, Result};

use crate::exit::{ensure_use, wrong_use};

/// What a command does with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileUse {
    Reads,
    Writes,
}

/// A file that a flag names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlagFile<'a> {
    /// As it is given on the command line, such as `--save`.
    pub(crate) flag: &'static str,
    pub(crate) path: &'a Path,
    pub(crate) purpose: FileUse,
}

/// The file that a flag names, if it was given.
pub(crate) fn read<'a>(flag: &'static str, path: Option<&'a PathBuf>) -> Option<FlagFile<'a>> {
    path.map(|path| FlagFile { flag, path, purpose: FileUse::Reads })
}

/// The same of one that is written.
pub(crate) fn written<'a>(flag: &'static str, path: Option<&'a PathBuf>) -> Option<FlagFile<'a>> {
    path.map(|path| FlagFile { flag, path, purpose: FileUse::Writes })
}

/// Refuses files of which one would overwrite another, and those that cannot be written.
pub(crate) fn check(files: &[FlagFile<'_>]) -> Result<()> {
    let writes = || files.iter().filter(|file| file.purpose == FileUse::Writes);
    writes().try_for_each(|file| file.check_place())?;
    for file in writes() {
        let mut others = files.iter().filter(|other| other.flag != file.flag);
        others.try_for_each(|other| file.check_beside(other))?;
    }
    // Last, so that nothing is touched for a command that is refused anyway.
    writes().try_for_each(|file| file.probe())
}

impl FlagFile<'_> {
    fn check_place(&self) -> Result<()> {
        let (flag, path, folder) = (self.flag, self.path.display(), folder_of(self.path));
        ensure_use!(
            fs::metadata(folder).is_ok_and(|folder| folder.is_dir()),
            "{flag} {path}: there is no folder {}",
            folder.display()
        );
        ensure_use!(!self.path.is_dir(), "{flag} {path}: it is a folder: name a file");
        Ok(())
    }

    fn check_beside(&self, other: &Self) -> Result<()> {
        // A run that goes on takes the place of the one that it goes on from.
        let goes_on = (self.flag, other.flag) == ("--save", "--resume");
        if goes_on || !is_same(self.path, other.path) {
            return Ok(());
        }
        let (flag, path) = (self.flag, self.path.display());
        Err(wrong_use(match other.purpose {
            FileUse::Reads => {
                format!(
                    "{flag} {path} would overwrite what {} reads: name another file",
                    other.flag
                )
            }
            FileUse::Writes => {
                format!("{flag} and {} both write {path}: name a file for each", other.flag)
            }
        }))
    }

    /// Finds out whether the file could be written, and leaves nothing behind.
    fn probe(&self) -> Result<()> {
        let (flag, path) = (self.flag, self.path.display());
        let probed = match fs::metadata(self.path) {
            Ok(found) if !found.is_file() => {
                OpenOptions::new().write(true).open(self.path).map(drop)
            }
            _ => probe_beside(self.path),
        };
        probed.with_context(|| format!("{flag} {path} cannot be written"))
    }
}

/// Files are written beside their place and then renamed, so it is the folder that must take them.
fn probe_beside(path: &Path) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let probe = path.with_file_name(format!(".{name}.{}.probe", process::id()));
    OpenOptions::new().write(true).create_new(true).open(&probe)?;
    fs::remove_file(probe)
}

/// Whether two paths name one file, there already or not, that one alone should write.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    place(one).is_some_and(|one| place(other) == Some(one))
}

/// The one path of a file that has many names, there already or not; none of what is no plain file and
/// can be written to by many, such as `/dev/null`.
fn place(path: &Path) -> Option<PathBuf> {
    match fs::canonicalize(path) {
        Ok(whole) => fs::metadata(&whole).is_ok_and(|found| found.is_file()).then_some(whole),
        Err(_) => Some(fs::canonicalize(folder_of(path)).ok()?.join(path.file_name()?)),
    }
}

/// What stands in a file.
pub(crate) fn text_of(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The folder that a file is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}
