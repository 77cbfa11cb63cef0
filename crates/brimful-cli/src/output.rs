//! What the program writes: reports to standard output, files, and what went wrong to standard error.

use std::env;
use std::fmt::{Display, Write as _};
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result};
use brimful::save;
use serde::Serialize;

use crate::{interrupt, progress};

/// Writes a report: a line of JSON where that is asked for, else its text.
pub fn report(report: &(impl Display + Serialize), json: bool) -> Result<()> {
    if json { line(&serde_json::to_string(report)?) } else { line(&report.to_string()) }
}

/// Writes a line to standard output. A reader that has gone away, as `head` does, ends the program
/// quietly; a training first saves what it has done.
pub fn line(text: &str) -> Result<()> {
    piece(&format!("{}\n", text.trim_end()))
}

/// Writes sentences to standard output: on a terminal, its end cuts no word.
pub(crate) fn prose(text: &str) -> Result<()> {
    match columns() {
        Some(width) => {
            line(&text.lines().map(|text| fitted(text, width)).collect::<Vec<_>>().join("\n"))
        }
        None => line(text),
    }
}

/// The width of the terminal that standard output is, if it is one.
pub(crate) fn columns() -> Option<usize> {
    terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| width.0.into())
}

/// A line cut at spaces; what follows a cut is set in.
fn fitted(line: &str, width: usize) -> String {
    let cut = line.char_indices().nth(width).and_then(|(end, next)| match next {
        ' ' => Some(end),
        _ => line[..end].rfind(' '),
    });
    match cut.filter(|cut| !line[..*cut].trim().is_empty()) {
        Some(cut) => {
            let rest = format!("    {}", line[cut..].trim_start());
            format!("{}\n{}", line[..cut].trim_end(), fitted(&rest, width))
        }
        None => line.to_owned(),
    }
}

/// Writes a text to standard output as it is, at once.
pub(crate) fn piece(text: &str) -> Result<()> {
    progress::aside(|| {
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                match interrupt::ask_unread() {
                    true => Ok(()),
                    false => std::process::exit(0),
                }
            }
            written => written.context("cannot write to standard output"),
        }
    })
}

/// Writes a file whole, or not at all.
pub fn file(path: &Path, text: &str) -> Result<()> {
    Ok(save::replace(path, text.as_bytes())?)
}

/// Whether what goes to standard output may be coloured.
pub fn colored() -> bool {
    io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Writes what went wrong to standard error: in one line, or with all that is known of it.
pub(crate) fn complain(program: &str, error: &anyhow::Error, verbose: bool) {
    let text = causes(error);
    let mut lines = text.lines();
    let mut message = format!("{program}: {}", lines.next().unwrap_or_default());
    if verbose {
        message.extend(lines.map(|line| format!("\n{line}")));
        for cause in error.chain() {
            // Writing to a text cannot fail.
            let _ = write!(message, "\n  from {cause:?}");
        }
    } else if lines.next().is_some() {
        message.push_str(" (--verbose shows the rest)");
    }
    progress::say(&message);
}

/// An error and its causes in one sentence; one that an outer one has said already is left out.
pub fn causes(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |said, cause| {
        let cause = cause.to_string();
        match said.as_str() {
            "" => cause,
            _ if said.contains(&cause) => said,
            _ => format!("{said}: {cause}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn lines_are_cut_at_words() {
        assert_eq!(fitted("one two three", 13), "one two three");
        assert_eq!(fitted("one two three", 12), "one two\n    three");
        assert_eq!(fitted("one two three", 9), "one two\n    three");
        assert_eq!(fitted("8×8 pixels, 10 classes", 11), "8×8 pixels,\n    10\n    classes");
        assert_eq!(fitted("incomprehensibilities", 8), "incomprehensibilities");
    }

    #[test]
    fn a_cause_is_said_once() {
        let error = anyhow!("no space left").context("cannot write a: no space left");
        assert_eq!(causes(&error), "cannot write a: no space left");
        assert_eq!(causes(&anyhow!("b").context("a")), "a: b");
    }
}
