//! Handling of Ctrl-C and SIGTERM during a benchmark: keeps the rows measured so far and prints a message.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::Result;
use brimful_cli::command_line::CommandLine;
use brimful_cli::exit::Exit;
use brimful_cli::progress;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::BenchArgs;
use crate::journal::OURS;

/// Starts a thread that waits for a signal. Every row is written as it comes, so there is nothing to flush.
pub(crate) fn keep_rows(folder: Option<PathBuf>) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        progress::say(&format!("{}: {}", BenchArgs::PROGRAM, parting(folder.as_deref())));
        // Without destructors: libtorch's would free memory that the running step still uses.
        let exit = Exit::Interrupted { signal: signal as u8 };
        signal_hook::low_level::exit(exit.code().into());
    })?;
    Ok(())
}

fn parting(folder: Option<&Path>) -> String {
    let Some(folder) = folder else {
        return "interrupted: the rows above are what was measured".to_owned();
    };
    let rows = fs::read_to_string(folder.join(OURS)).unwrap_or_default();
    match rows.lines().count() {
        0 => "interrupted before the first row".to_owned(),
        count => format!("interrupted: {count} rows are kept in {}", folder.display()),
    }
}
