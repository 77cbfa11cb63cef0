//! What runs now, on standard error: a line that is rewritten on a terminal, else a line a row; with
//! an estimate of the time that is left.

use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::time::Instant;

/// Tells a waiting person what runs, and for how long.
#[derive(Debug)]
pub(super) struct Progress {
    terminal: bool,
    began: Instant,
    /// Pieces of work of about the same length, in all and done.
    total: usize,
    finished: Cell<usize>,
}

impl Progress {
    /// For work of so many pieces of about the same length.
    pub(super) fn new(pieces: usize) -> Self {
        let (terminal, began) = (io::stderr().is_terminal(), Instant::now());
        Self { terminal, began, total: pieces, finished: Cell::new(0) }
    }

    /// A row begins.
    pub(super) fn row(&self, title: &str) {
        let left = self.left();
        if self.terminal {
            write(&format!("\r\x1b[K{title}: preparing{left}"));
        } else {
            write(&format!("{title}{left}\n"));
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
        write(&format!("\r\x1b[K{title}: {step}, {contestant}{}", self.left()));
    }

    /// A step begins; about so many seconds will go by until all of its table is done.
    pub(super) fn step(&self, title: &str, what: &str, seconds: f64) {
        if self.terminal {
            write(&format!("\r\x1b[K{title}: {what}{}", about(seconds)));
        }
    }

    /// Some pieces of the work are done.
    pub(super) fn advance(&self, pieces: usize) {
        self.finished.set(self.finished.get() + pieces);
    }

    /// The row is measured: makes room for its figures.
    pub(super) fn done(&self) {
        if self.terminal {
            write("\r\x1b[K");
        }
    }

    /// What is left takes as long as what was done, piece by piece.
    fn left(&self) -> String {
        let (finished, total) = (self.finished.get(), self.total);
        if finished == 0 || finished >= total {
            return String::new();
        }
        let each = self.began.elapsed().as_secs_f64() / finished as f64;
        about(each * (total - finished) as f64)
    }
}

fn about(seconds: f64) -> String {
    match seconds.ceil() as u64 {
        short @ 0..120 => format!(", about {short} s left"),
        long => format!(", about {} min left", long.div_ceil(60)),
    }
}

fn write(text: &str) {
    let mut err = io::stderr().lock();
    // Whether anybody reads it must not matter to the measurement.
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}
