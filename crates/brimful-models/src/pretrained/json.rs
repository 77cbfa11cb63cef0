//! Reading and writing of JSON objects.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::PretrainedError;

/// Limit on the size of a JSON file: indexes of the largest models have a few MB.
const LARGEST: u64 = 64 << 20;

/// Reads the object in a file.
pub(super) fn read(path: &Path) -> Result<Map<String, Value>, PretrainedError> {
    let found = fs::metadata(path).map_err(|reason| unreadable(path, reason))?;
    // Reading a device or a pipe might never end.
    if !found.is_file() {
        return Err(unreadable(path, "it is no file"));
    }
    if found.len() > LARGEST {
        let length = found.len();
        return Err(unreadable(path, format!("it has {length} bytes: {LARGEST} are the most")));
    }
    let text = fs::read(path).map_err(|reason| unreadable(path, reason))?;
    serde_json::from_slice(&text).map_err(|reason| unreadable(path, reason))
}

/// Writes an object, indented.
pub(super) fn write(path: &Path, object: &Value) -> Result<(), PretrainedError> {
    fs::write(path, format!("{object:#}\n")).map_err(|reason| refused("write", path, reason))
}

pub(super) fn unreadable(path: &Path, reason: impl Display) -> PretrainedError {
    refused("read", path, reason)
}

fn refused(action: &'static str, path: &Path, reason: impl Display) -> PretrainedError {
    let (path, reason) = (path.display().to_string(), reason.to_string());
    PretrainedError::File { action, path, reason }
}
