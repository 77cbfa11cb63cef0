//! Check that saving to a folder would not lose other files.

use std::fs::{self, DirEntry};
use std::io;
use std::path::Path;

use super::json::unreadable;
use super::{PretrainedError, TOKENIZER_FILES};

/// Name under which a program may keep the state of a training beside its model or adapter. The file is removed when
/// the folder is rewritten.
pub const RUN_FILE: &str = "brimful_run.safetensors";

/// Refuses a folder with files other than `own` and a tokenizer's, because they would be lost.
///
/// # Errors
/// Fails with the first unknown name in the folder.
pub(super) fn check_place(folder: &Path, own: &[&str]) -> Result<(), PretrainedError> {
    let occupied =
        |other: String| PretrainedError::Occupied { folder: folder.display().to_string(), other };
    if folder.is_file() {
        return Err(occupied("a file".into()));
    }
    if !folder.exists() {
        return Ok(());
    }
    let entries = fs::read_dir(folder).map_err(|reason| unreadable(folder, reason))?;
    let name = |entry: io::Result<DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    let names = entries.map(name).collect::<io::Result<Vec<String>>>();
    let mut names = names.map_err(|reason| unreadable(folder, reason))?;
    names.sort();
    let is_own =
        |name: &str| own.contains(&name) || TOKENIZER_FILES.contains(&name) || name == RUN_FILE;
    names.into_iter().find(|name| !is_own(name)).map_or(Ok(()), |other| Err(occupied(other)))
}
