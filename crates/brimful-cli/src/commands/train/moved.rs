//! Fingerprints of data and model folders. With them, a resumed run recognises unchanged content at a new path,
//! and changed content at the old path.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use brimful::save::Metadata;

use super::TrainOptions;
use crate::setting::ModelSource;

/// Bytes at the beginning of a file that its fingerprint covers.
const BEGINNING: u64 = 1 << 20;
/// Limit on the number of a folder's files whose sizes and samples the fingerprints cover. Fingerprints cover only
/// the names of the other files.
const SIZED: usize = 1000;
/// Number of pieces sampled from all files together; each file has at least one.
const PIECES: u64 = 64;
/// Bytes of a piece. The first piece covers the header of most safetensors files.
const PIECE: u64 = 1 << 16;
/// Files of a model's folder that a training depends on, beside its weights.
const DESCRIPTIONS: [&str; 3] = ["config.json", "tokenizer.json", "adapter_config.json"];

/// Suffix of the metadata key, after the flag's name, for the fingerprint of names, sizes and a file's beginning.
const CONTENT: &str = "-content";
/// Suffix for the fingerprint of sampled bytes, which runs of earlier versions lack.
const SAMPLED: &str = "-sampled";

/// Comparison of the content at a flag's path with the content when the run was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Same,
    Other,
    /// The content now, or the content then, has no fingerprint.
    Unknown,
}

/// Function that returns whether the content of a folder's file is sampled.
type IsRead = fn(&Path) -> bool;

/// Computes the fingerprints of the run's data, model and adapter, for its metadata.
pub(super) fn contents(options: &TrainOptions) -> Metadata {
    let model = match &options.model {
        ModelSource::Folder(folder) => Some(folder.as_path()),
        ModelSource::Named(_) => None,
    };
    let is_any: IsRead = |_| true;
    let places = [
        ("data", Some(Path::new(&options.data)), is_any),
        ("model", model, describes_model as IsRead),
        ("adapter", options.fine_tune.adapter.as_deref(), describes_model),
    ];
    let mut contents = Metadata::new();
    for (flag, path, is_read) in places {
        if let Some(Ok(Some([content, sampled]))) = path.map(|path| marks(path, is_read)) {
            contents.insert(format!("{flag}{CONTENT}"), content);
            contents.insert(format!("{flag}{SAMPLED}"), sampled);
        }
    }
    contents
}

/// Returns whether a training depends on this file, by its path within a model's or an adapter's folder.
fn describes_model(path: &Path) -> bool {
    let is_weights = path.extension().is_some_and(|extension| extension == "safetensors");
    let is_direct = path.parent() == Some(Path::new(""));
    is_direct && (is_weights || DESCRIPTIONS.iter().any(|name| path == Path::new(name)))
}

/// Compares the content at a flag's path now with the content when the run was saved. `is_moved` is true if the
/// path has changed.
pub(super) fn compare(flag: &str, then: &Metadata, now: &Metadata, is_moved: bool) -> Content {
    let is_same = |suffix: &str| {
        let key = format!("{flag}{suffix}");
        Some(then.get(&key)? == now.get(&key)?)
    };
    // A model's folder may have new files that a training does not read. So if the path of a model or an adapter
    // is unchanged, only samples are compared.
    let content = is_same(CONTENT).filter(|_| is_moved || flag == "data");
    match (content, is_same(SAMPLED)) {
        (None, None) => Content::Unknown,
        (Some(false), _) | (_, Some(false)) => Content::Other,
        _ => Content::Same,
    }
}

/// Computes two fingerprints. The first covers a file's size and beginning, or the names and sizes in a folder.
/// The second covers samples of the files for which `is_read` returns true. Returns none for pipes, which can be
/// read only once.
fn marks(path: &Path, is_read: IsRead) -> io::Result<Option<[String; 2]>> {
    let found = fs::metadata(path)?;
    if found.is_file() {
        let mut beginning = Vec::new();
        File::open(path)?.take(BEGINNING).read_to_end(&mut beginning)?;
        return Ok(Some([mark(found.len(), &beginning), samples(&[path.to_owned()])?]));
    }
    if !found.is_dir() {
        return Ok(None);
    }
    let mut files = Vec::new();
    list(path, &mut files)?;
    files.sort();
    let (mut names, mut read) = (Vec::new(), Vec::new());
    for (number, file) in files.iter().enumerate() {
        let size = if number < SIZED { fs::metadata(file)?.len() } else { 0 };
        let name = file.strip_prefix(path).unwrap_or(file);
        names.extend([name.as_os_str().as_encoded_bytes(), b"\0", &size.to_le_bytes()].concat());
        if is_read(name) && read.len() < SIZED {
            read.push(file.clone());
        }
    }
    Ok(Some([mark(files.len() as u64, &names), samples(&read)?]))
}

fn mark(size: u64, bytes: &[u8]) -> String {
    format!("{size}:{:08x}", crc32c::crc32c(bytes))
}

/// Fingerprints files by their sizes, and evenly spaced pieces of each.
fn samples(files: &[PathBuf]) -> io::Result<String> {
    let each = (PIECES / files.len().max(1) as u64).max(1);
    let (mut sizes, mut sum, mut piece) = (0, 0, Vec::new());
    for path in files {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        for start in (0..size).step_by(size.div_ceil(each).max(PIECE) as usize) {
            piece.clear();
            file.seek(SeekFrom::Start(start))?;
            file.by_ref().take(PIECE).read_to_end(&mut piece)?;
            sum = crc32c::crc32c_append(sum, &piece);
        }
        sizes += size;
    }
    Ok(format!("{sizes}:{sum:08x}"))
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

    fn marked(path: &Path) -> [String; 2] {
        marks(path, describes_model).expect("read").expect("marks")
    }

    #[test]
    fn what_was_moved_is_known_again_and_what_is_other_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = |name: &str| folder.path().join(name);
        let marked = |name: &str| marked(&place(name));
        for (name, text) in [("a", "one"), ("b", "one"), ("c", "two"), ("d", "one and more")] {
            fs::write(place(name), text).expect("written");
            fs::create_dir_all(place(&format!("{name}s/in"))).expect("a folder");
            fs::write(place(&format!("{name}s/in/file")), text).expect("written");
        }
        assert_eq!((marked("a"), marked("as")), (marked("b"), marked("bs")));
        assert!(marked("a") != marked("c") && marked("a") != marked("d"));
        assert_ne!(marked("as"), marked("ds"));
        assert_eq!(marks(Path::new("/dev/null"), describes_model).expect("read"), None);
    }

    #[test]
    fn a_model_is_another_where_its_bytes_are_and_the_same_beside_other_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let weights = folder.path().join("model.safetensors");
        let mut bytes = vec![7; 9 << 20];
        fs::write(&weights, &bytes).expect("written");
        let compared = |then: &[String; 2]| {
            let metadata = |[content, sampled]: [String; 2]| {
                let keys = [CONTENT, SAMPLED].map(|suffix| format!("model{suffix}"));
                keys.into_iter().zip([content, sampled]).collect::<Metadata>()
            };
            let now = metadata(marked(folder.path()));
            let then = metadata(then.clone());
            [false, true].map(|is_moved| compare("model", &then, &now, is_moved))
        };
        let then = marked(folder.path());
        assert_eq!(compared(&then), [Content::Same; 2]);
        fs::write(folder.path().join("README.md"), "A model.").expect("written");
        assert_eq!(compared(&then), [Content::Same, Content::Other]);
        let then = marked(folder.path());
        bytes[4 << 20..5 << 20].fill(8);
        fs::write(&weights, &bytes).expect("written");
        assert_eq!(compared(&then), [Content::Other; 2]);
        let none = Metadata::new();
        assert_eq!(compare("model", &none, &none, false), Content::Unknown);
    }
}
