//! Integers in a file, with as many bytes each as the largest needs, read on demand.

use std::env;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};

/// Integers on the disk.
#[derive(Debug, Clone)]
pub(super) struct NumberFile {
    file: Arc<File>,
    /// Bytes per number, little-endian.
    width: usize,
    len: u64,
}

impl NumberFile {
    /// Opens a file in which each byte is a number.
    pub(super) fn of_bytes(file: File) -> Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self { file: Arc::new(file), width: 1, len })
    }

    /// Returns how many numbers there are.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Reads the numbers in this range.
    pub(super) fn read(&self, places: Range<u64>) -> Result<Vec<i64>> {
        let Self { file, width, .. } = self;
        let mut bytes = vec![0; (places.end - places.start) as usize * width];
        file.read_exact_at(&mut bytes, places.start * *width as u64)
            .context("the data cannot be read any more: do not change them while they are used")?;
        Ok(bytes.chunks_exact(*width).map(number).collect())
    }
}

fn number(bytes: &[u8]) -> i64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(whole)
}

/// Writer of numbers to a file without a name, which disappears once it is closed.
#[derive(Debug)]
pub(super) struct NumberWriter {
    file: BufWriter<File>,
    folder: PathBuf,
    width: usize,
    len: u64,
}

impl NumberWriter {
    /// Makes a writer for integers from 0 to below the limit.
    pub(super) fn new(limit: i64) -> Result<Self> {
        let holds = |width: &usize| limit <= 1 << (8 * width);
        let width = [1, 2, 4].into_iter().find(holds).unwrap_or(8);
        let folder = scratch_folder();
        let file = fs::create_dir_all(&folder).and_then(|()| tempfile::tempfile_in(&folder));
        let file = file.with_context(|| unwritten(&folder))?;
        Ok(Self { file: BufWriter::new(file), folder, width, len: 0 })
    }

    /// Returns how many numbers there are so far.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn append(&mut self, numbers: &[i64]) -> Result<()> {
        self.len += numbers.len() as u64;
        let bytes =
            numbers.iter().flat_map(|number| number.to_le_bytes().into_iter().take(self.width));
        let bytes: Vec<u8> = bytes.collect();
        self.file.write_all(&bytes).with_context(|| unwritten(&self.folder))
    }

    /// Returns the numbers for reading.
    pub(super) fn finish(self) -> Result<NumberFile> {
        let Self { file, folder, width, len } = self;
        let file = file.into_inner().map_err(|error| error.into_error());
        Ok(NumberFile { file: Arc::new(file.with_context(|| unwritten(&folder))?), width, len })
    }
}

fn unwritten(folder: &Path) -> String {
    format!(
        "the tokens cannot be written to {}: free some space, or set XDG_CACHE_HOME to a folder on a larger disk",
        folder.display()
    )
}

/// Returns a folder in the user's cache, because temporary folders are often in memory.
fn scratch_folder() -> PathBuf {
    let named = |name| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    cache.map_or_else(env::temp_dir, |cache| cache.join("brimful"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_from_any_place() {
        for limit in [0x100, 0x101, 0x1_0000, 0x1_0001, 0x1_0000_0000, i64::MAX] {
            let mut writer = NumberWriter::new(limit).expect("a file");
            writer.append(&[0, 1]).expect("written");
            writer.append(&[limit - 1, 7]).expect("written");
            let file = writer.finish().expect("a file");
            assert_eq!(file.len(), 4);
            assert_eq!(file.read(1..4).expect("numbers"), [1, limit - 1, 7], "{limit}");
            let error = format!("{:#}", file.read(3..5).expect_err("four alone"));
            assert!(error.starts_with("the data cannot be read any more"), "{error}");
        }
    }
}
