//! What runs now, on standard error: a line that is rewritten on a terminal, else a line a row.

use std::io::{self, IsTerminal, Write};

/// Tells a waiting person what runs.
#[derive(Debug)]
pub(super) struct Progress {
    terminal: bool,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self { terminal: io::stderr().is_terminal() }
    }

    /// A row begins.
    pub(super) fn row(&self, title: &str) {
        if self.terminal {
            write(&format!("\r\x1b[K{title}: preparing"));
        } else {
            write(&format!("{title}\n"));
        }
    }

    /// A contestant's turn begins.
    pub(super) fn turn(
        &self,
        title: &str,
        contestant: &str,
        turn: usize,
        warm_up: usize,
        repeats: usize,
    ) {
        if !self.terminal {
            return;
        }
        let step = match turn.checked_sub(warm_up) {
            None => format!("warm-up {} of {warm_up}", turn + 1),
            Some(measured) => format!("step {} of {repeats}", measured + 1),
        };
        write(&format!("\r\x1b[K{title}: {step}, {contestant}"));
    }

    /// A step begins; about so many seconds will go by until all of its table is done.
    pub(super) fn step(&self, title: &str, what: &str, seconds: f64) {
        if !self.terminal {
            return;
        }
        let left = match seconds.ceil() as u64 {
            short @ 0..120 => format!("{short} s"),
            long => format!("{} min", long.div_ceil(60)),
        };
        write(&format!("\r\x1b[K{title}: {what}, about {left} left"));
    }

    /// The row is measured: makes room for its figures.
    pub(super) fn done(&self) {
        if self.terminal {
            write("\r\x1b[K");
        }
    }
}

fn write(text: &str) {
    let mut err = io::stderr().lock();
    // Whether anybody reads it must not matter to the measurement.
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}
