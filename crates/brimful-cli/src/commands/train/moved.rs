//! Fingerprints that recognise data and model folders under a new path.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use brimful::save::Metadata;

use super::TrainOptions;
use crate::setting::ModelSource;

/// Bytes at the beginning of a file that its fingerprint covers.
const BEGINNING: u64 = 1 << 20;
/// Number of a folder's files whose sizes count; the others count by name only.
const SIZED: usize = 1000;

/// Suffix of the metadata keys of fingerprints, after the name of their flag.
pub(super) const CONTENT: &str = "-content";

/// Computes the fingerprints of what the run reads, for its file.
pub(super) fn contents(options: &TrainOptions) -> Metadata {
    let model = match &options.model {
        ModelSource::Folder(folder) => Some(folder.as_path()),
        ModelSource::Named(_) => None,
    };
    let places = [
        ("data", Some(Path::new(&options.data))),
        ("model", model),
        ("adapter", options.fine_tune.adapter.as_deref()),
    ];
    let marked = |(flag, path): (&str, Option<&Path>)| {
        Some((format!("{flag}{CONTENT}"), content(path?).ok()??))
    };
    places.into_iter().filter_map(marked).collect()
}

/// Fingerprints a file by its size and beginning, or a folder by the names and sizes in it. Returns none for pipes,
/// which can be read only once.
fn content(path: &Path) -> io::Result<Option<String>> {
    let found = fs::metadata(path)?;
    if found.is_file() {
        let mut beginning = Vec::new();
        File::open(path)?.take(BEGINNING).read_to_end(&mut beginning)?;
        return Ok(Some(mark(found.len(), &beginning)));
    }
    if !found.is_dir() {
        return Ok(None);
    }
    let mut files = Vec::new();
    list(path, &mut files)?;
    files.sort();
    let mut names = Vec::new();
    for (number, file) in files.iter().enumerate() {
        let size = if number < SIZED { fs::metadata(file)?.len() } else { 0 };
        let name = file.strip_prefix(path).unwrap_or(file).as_os_str().as_encoded_bytes();
        names.extend([name, b"\0", &size.to_le_bytes()].concat());
    }
    Ok(Some(mark(files.len() as u64, &names)))
}

fn mark(size: u64, bytes: &[u8]) -> String {
    format!("{size}:{:08x}", crc32c::crc32c(bytes))
}

/// Lists the files in a folder and its subfolders.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => list(&entry.path(), files)?,
            false => files.push(entry.path()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_moved_is_known_again_and_what_is_other_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = |name: &str| folder.path().join(name);
        let marked = |name: &str| content(&place(name)).expect("read").expect("a mark");
        for (name, text) in [("a", "one"), ("b", "one"), ("c", "two"), ("d", "one and more")] {
            fs::write(place(name), text).expect("written");
            fs::create_dir_all(place(&format!("{name}s/in"))).expect("a folder");
            fs::write(place(&format!("{name}s/in/file")), text).expect("written");
        }
        assert_eq!((marked("a"), marked("as")), (marked("b"), marked("bs")));
        assert!(marked("a") != marked("c") && marked("a") != marked("d"));
        assert_ne!(marked("as"), marked("ds"));
        assert_eq!(content(Path::new("/dev/null")).expect("read"), None);
    }
}
