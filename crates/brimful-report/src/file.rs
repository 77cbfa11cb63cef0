//! Reads and checks run files, and writes them atomically.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Compared, Run, RunError};
use brimful::save;

/// Format name at the beginning of every run file.
const FORMAT: &str = "brimful run";
const VERSION: u64 = 1;

/// Beginning of a run file.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

#[derive(Serialize)]
struct Written<'a> {
    format: &'static str,
    version: u64,
    #[serde(flatten)]
    run: &'a Run,
}

impl Run {
    /// Returns the file's text: see [the format](super#the-file).
    #[must_use]
    pub fn to_json(&self) -> String {
        let written = Written { format: FORMAT, version: VERSION, run: self };
        serde_json::to_string(&written).expect("strings, numbers, and keys that are strings")
    }

    /// Writes the run to a file, which is replaced atomically.
    ///
    /// # Errors
    /// When the file system refuses; the error names the remedy.
    pub fn write(&self, path: impl AsRef<Path>) -> brimful::Result<()> {
        save::replace(path, self.to_json().as_bytes())
    }

    /// Reads a run file.
    ///
    /// # Errors
    /// When the file cannot be read, is not a run file or has another version, or its contents are invalid.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, RunError> {
        let path = path.as_ref();
        let file = path.display().to_string();
        let text = fs::read(path).map_err(|error| RunError::Unreadable {
            path: file.clone(),
            reason: error.to_string(),
        })?;
        parse(&text, file)
    }

    /// Checks that columns have the same length and valid entries.
    fn check(&self) -> Result<(), String> {
        self.steps.check(self.devices.len())?;
        for Compared { title, measured, simulated } in &self.timelines {
            for timeline in [measured, simulated].into_iter().flatten() {
                timeline.check().map_err(|reason| format!("{reason} in '{title}'"))?;
            }
        }
        Ok(())
    }
}

fn parse(text: &[u8], path: String) -> Result<Run, RunError> {
    let head: Head = match serde_json::from_slice(text) {
        Ok(head) => head,
        // The text begins as JSON, but is cut off.
        Err(error) if error.is_eof() && !text.is_empty() => {
            return Err(RunError::Damaged { path, reason: error.to_string() });
        }
        Err(error) => return Err(RunError::NotARun { path, reason: error.to_string() }),
    };
    if head.format != FORMAT {
        let reason = format!("its format is '{}'", head.format);
        return Err(RunError::NotARun { path, reason });
    }
    if head.version != VERSION {
        return Err(RunError::OtherVersion { path, found: head.version, known: VERSION });
    }
    let run: Result<Run, String> = serde_json::from_slice(text).map_err(|error| error.to_string());
    let run = run.and_then(|run| run.check().map(|()| run));
    run.map_err(|reason| RunError::Damaged { path, reason })
}
