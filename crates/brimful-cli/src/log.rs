//! The library's log on standard error, above the bars: warnings, and with `--verbose` all else.

use std::io::{self, Write};

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::progress;

/// Listens to the log from now on.
pub(crate) fn listen(verbose: bool) {
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let lines = tracing_subscriber::fmt::layer().without_time().with_ansi(false);
    let lines = lines.with_target(verbose).with_writer(|| Aside);
    let ours = Targets::new().with_target("brimful", level);
    tracing_subscriber::registry().with(ours).with(lines).init();
}

/// Standard error, while no bar is in the way. A log line comes in one piece.
struct Aside;

impl Write for Aside {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        progress::aside(|| io::stderr().write_all(line))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
