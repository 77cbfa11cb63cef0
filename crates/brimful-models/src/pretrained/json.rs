//! JSON objects to and from files.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::PretrainedError;

/// The object that a file holds.
pub(super) fn read(path: &Path) -> Result<Map<String, Value>, PretrainedError> {
    let text = fs::read(path).map_err(|reason| unreadable(path, reason))?;
    serde_json::from_slice(&text).map_err(|reason| unreadable(path, reason))
}

/// Writes an object for people to read.
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
