//! What the program writes: one report at a time, as text or as JSON.

use std::fmt::Display;
use std::io::{self, Write};

use anyhow::Result;
use serde::Serialize;

/// Writes a report: a line of JSON where that is asked for, else its text.
pub fn report(report: &(impl Display + Serialize), json: bool) -> Result<()> {
    if json { line(&serde_json::to_string(report)?) } else { line(&report.to_string()) }
}

/// Writes a line to standard output. A reader that has gone away, as `head` does, ends the program
/// quietly.
pub fn line(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        written => Ok(written?),
    }
}

/// Writes what went wrong to standard error, in one line.
pub fn complain(error: &anyhow::Error) {
    // Nothing is left to do where even this cannot be written.
    let _ = writeln!(io::stderr(), "brimful: {error:#}");
}
