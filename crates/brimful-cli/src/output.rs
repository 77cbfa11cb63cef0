//! Output of the program: reports to standard output, files, and errors to standard error.

use std::env;
use std::fmt::{Display, Write as _};
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result};
use brimful::{internal, save};
use brimful_torch::libtorch;
use serde::Serialize;

use crate::exit::{self, has_exit, ran_out};
use crate::progress;

/// Prints a report: as a line of JSON if `json` is true, else as text.
pub fn report(report: &(impl Display + Serialize), json: bool) -> Result<()> {
    if json { line(&serde_json::to_string(report)?) } else { line(&report.to_string()) }
}

/// Prints a line to standard output. If the reader has closed the pipe, as `head` does, the program exits quietly.
/// A training run first finishes its step, and saves its progress if `--save` is given.
pub fn line(text: &str) -> Result<()> {
    piece(&format!("{}\n", text.trim_end()))
}

/// Prints sentences to standard output, wrapped at spaces on a terminal.
pub(crate) fn prose(text: &str) -> Result<()> {
    match columns() {
        Some(width) => {
            line(&text.lines().map(|text| fitted(text, width)).collect::<Vec<_>>().join("\n"))
        }
        None => line(text),
    }
}

/// Returns the width of the terminal, if standard output is one.
pub(crate) fn columns() -> Option<usize> {
    terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| width.0.into())
}

/// Wraps a line at spaces, with an indent after each break.
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

/// Prints a text unchanged to standard output, and flushes.
pub(crate) fn piece(text: &str) -> Result<()> {
    progress::aside(|| {
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => match exit::ask_unread() {
                true => Ok(()),
                false => libtorch::exit_at_once(0),
            },
            written => written.context("cannot write to standard output"),
        }
    })
}

/// Writes a file atomically.
pub fn file(path: &Path, text: &str) -> Result<()> {
    Ok(save::replace(path, text.as_bytes())?)
}

/// Returns whether standard output may be coloured.
pub fn colored() -> bool {
    io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Prints an error to standard error: in one line, or with every cause if `verbose` is true.
pub(crate) fn complain(program: &str, error: &anyhow::Error, verbose: bool) {
    let text = causes(error);
    let mut lines = text.lines();
    let mut message = format!("{program}: {}", lines.next().unwrap_or_default());
    if verbose {
        message.extend(lines.map(|line| format!("\n{line}")));
        for cause in error.chain() {
            // Writing to a string cannot fail.
            let _ = write!(message, "\n  from {cause:?}");
        }
    } else if lines.next().is_some() {
        message.push_str(" (--verbose shows the rest)");
    }
    progress::say(&message);
}

/// Formats a count with its unit. The unit gets a plural `s` unless the count is 1.
pub(crate) fn numbered(count: usize, unit: &str) -> String {
    match count {
        1 => format!("1 {unit}"),
        _ => format!("{count} {unit}s"),
    }
}

/// Remedy in an out-of-memory error, unless the command gives a better remedy.
const SMALLER: &str = "brimful COMMAND --help has the flags that save memory, such as --dtype bf16";

/// Joins an error and its causes in one sentence. Leaves out a cause whose text an outer error already contains.
/// If memory ran out, the program's remedy replaces the library's remedy.
pub fn causes(error: &anyhow::Error) -> String {
    let said = causes_alone(error);
    let root = internal::without_remedy(&error.root_cause().to_string());
    match ran_out(error) && !has_exit(error) && said.ends_with(&root) {
        true => format!("{said}; {SMALLER}"),
        false => said,
    }
}

/// Joins an error and its causes as [`causes`] does, but adds no remedy for a lack of memory.
pub(crate) fn causes_alone(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |said, cause| {
        let cause = internal::without_remedy(&cause.to_string());
        match said.as_str() {
            "" => cause,
            _ if said.contains(&cause) => said,
            _ => format!("{said}: {cause}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use brimful::Error;
    use tch::TchError;

    use super::*;

    #[test]
    fn lines_are_cut_at_words() {
        assert_eq!(fitted("one two three", 13), "one two three");
        assert_eq!(fitted("one two three", 12), "one two\n    three");
        assert_eq!(fitted("one two three", 9), "one two\n    three");
        assert_eq!(fitted("8×8 pixels, 10 classes", 11), "8×8 pixels,\n    10\n    classes");
        assert_eq!(fitted("incomprehensibilities", 8), "incomprehensibilities");
    }

    #[test]
    fn a_remedy_in_words_of_the_library_is_replaced() {
        let oom =
            || Error::from(TchError::Torch("CUDA out of memory. Tried to allocate 2 GiB.".into()));
        assert!(oom().to_string().contains("MicroBatches::Auto"), "{}", oom());
        let built = Err::<(), _>(oom()).context("the model was not built").expect_err("memory");
        let says = "the model was not built: CUDA out of memory. Tried to allocate 2 GiB.; brimful COMMAND --help";
        assert!(causes(&built).starts_with(says), "{}", causes(&built));
        let advised = anyhow::Error::from(oom())
            .context("CUDA out of memory. Tried to allocate 2 GiB.; try less");
        assert_eq!(causes(&advised), "CUDA out of memory. Tried to allocate 2 GiB.; try less");
    }

    #[test]
    fn one_is_no_plural() {
        assert_eq!(
            [0, 1, 2].map(|count| numbered(count, "image")),
            ["0 images", "1 image", "2 images"]
        );
    }

    #[test]
    fn a_cause_is_said_once() {
        let error = anyhow!("no space left").context("cannot write a: no space left");
        assert_eq!(causes(&error), "cannot write a: no space left");
        assert_eq!(causes(&anyhow!("b").context("a")), "a: b");
    }
}
