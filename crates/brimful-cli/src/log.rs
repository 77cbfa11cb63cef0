//! The library's log on standard error, above the bars: warnings in plain words, or with `--verbose` everything
//! unchanged.

use std::io::{self, Write};

use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::{self, format};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::progress;

/// Starts to print the log.
pub(crate) fn listen(verbose: bool) {
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let ours = Targets::new().with_target("brimful", level);
    let plain = fmt::layer().without_time().with_ansi(false);
    let lines = if verbose {
        plain.with_writer(|| Aside { before: "" }).boxed()
    } else {
        // Fields of a warning are printed in plain words, not as name = value.
        let told = format::debug_fn(|out, field, value| match field.name() {
            "message" => write!(out, "{value:?}"),
            name => write!(out, "{}: {value:?}", name.replace('_', " ")),
        });
        let words = plain.with_level(false).with_target(false).fmt_fields(told.delimited("; "));
        words.with_writer(|| Aside { before: "brimful: warning: " }).boxed()
    };
    tracing_subscriber::registry().with(ours).with(lines).init();
}

/// Writer to standard error that moves the bars out of the way. A log line comes in one piece.
struct Aside {
    /// Prefix of every line.
    before: &'static str,
}

impl Write for Aside {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let whole = [self.before.as_bytes(), line.trim_ascii_start()].concat();
        progress::aside(|| io::stderr().write_all(&whole))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
