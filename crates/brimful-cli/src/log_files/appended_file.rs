//! A log file that grows by whole entries, until a write fails.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::files::claim;
use crate::progress;

/// An append-only file that always ends with a whole entry.
#[derive(Debug)]
pub(super) struct AppendedFile {
    path: PathBuf,
    /// Open file; none after a failed write.
    file: Option<File>,
    /// Length of all whole entries, in bytes.
    length: u64,
}

impl AppendedFile {
    /// Opens an empty file, replacing existing content.
    pub(super) fn empty(path: &Path) -> Result<Self> {
        let mut file = open(path, OpenOptions::new().write(true))?;
        if is_plain(&file) {
            cut(&mut file, 0).with_context(|| unwritable(path))?;
        }
        Ok(Self { path: path.to_owned(), file: Some(file), length: 0 })
    }

    /// Opens an existing file and returns its content, or makes an empty file.
    pub(super) fn existing(path: &Path) -> Result<(Self, Vec<u8>)> {
        let mut file = open(path, OpenOptions::new().write(true).read(true))?;
        let mut bytes = Vec::new();
        let read = file.read_to_end(&mut bytes);
        read.with_context(|| format!("cannot read {}", path.display()))?;
        let length = bytes.len() as u64;
        Ok((Self { path: path.to_owned(), file: Some(file), length }, bytes))
    }

    /// Truncates the file to `length` bytes.
    pub(super) fn cut_back(&mut self, length: usize) -> Result<()> {
        self.length = length as u64;
        let Some(file) = &mut self.file else { return Ok(()) };
        let cut = cut(file, self.length);
        cut.with_context(|| unwritable(&self.path))
    }

    /// Appends an entry. If the write fails, cuts the file back to its whole entries, reports the error, and
    /// writes nothing more. The run goes on, because it is worth more than its log.
    pub(super) fn append(&mut self, piece: &[u8]) {
        let Some(file) = &mut self.file else { return };
        match file.write_all(piece) {
            Ok(()) => self.length += piece.len() as u64,
            Err(error) => {
                // A pipe or device cannot be cut back.
                let _ = cut(file, self.length);
                self.file = None;
                progress::say(&format!(
                    "brimful: {}: {error}: the run continues without this log",
                    unwritable(&self.path)
                ));
            }
        }
    }
}

/// Opens a file and locks it for this process while it is open.
fn open(path: &Path, options: &mut OpenOptions) -> Result<File> {
    let options = options.create(true).truncate(false);
    let file = options.open(path).with_context(|| unwritable(path))?;
    if is_plain(&file) {
        claim(&file).with_context(|| unwritable(path))?;
    }
    Ok(file)
}

/// Returns whether the file is a regular file, which can be truncated and locked.
fn is_plain(file: &File) -> bool {
    file.metadata().is_ok_and(|found| found.is_file())
}

fn cut(file: &mut File, length: u64) -> io::Result<()> {
    file.set_len(length)?;
    file.seek(SeekFrom::Start(length))?;
    Ok(())
}

fn unwritable(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_given_up() {
        let mut full = AppendedFile::empty(Path::new("/dev/full")).expect("a device");
        full.append(b"a line\n");
        assert!(full.file.is_none());
        full.append(b"another\n");
        assert_eq!(full.length, 0);
    }

    #[test]
    fn a_file_is_written_by_one_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let mut first = AppendedFile::empty(&path).expect("a file");
        first.append(b"one");
        for second in [AppendedFile::empty(&path), AppendedFile::existing(&path).map(|it| it.0)] {
            let error = format!("{:#}", second.expect_err("it is taken"));
            assert!(error.ends_with("another program writes it now: name another file"), "{error}");
        }
        assert_eq!(fs::read(&path).expect("read"), b"one");
        drop(first);
        AppendedFile::empty(&path).expect("it is free again");
        assert_eq!(fs::read(&path).expect("read"), b"");
    }

    #[test]
    fn a_file_is_cut_back_and_grows_from_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        AppendedFile::empty(&path).expect("a file").append(b"one two");
        let (mut file, bytes) = AppendedFile::existing(&path).expect("a file");
        assert_eq!(bytes, b"one two");
        file.cut_back(4).expect("cut");
        file.append(b"three");
        assert_eq!(fs::read(&path).expect("read"), b"one three");
    }
}
