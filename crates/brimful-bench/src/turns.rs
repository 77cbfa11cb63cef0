//! Progress on standard error: a bar on a terminal, else a line per row.

use brimful_cli::progress;

/// Progress of the current measurement.
#[derive(Debug)]
pub(crate) struct TurnProgress {
    bar: progress::Progress,
}

impl TurnProgress {
    /// Creates progress over this many pieces of about equal length.
    pub(crate) fn new(pieces: usize) -> Self {
        Self { bar: progress::Progress::new(pieces, "turns") }
    }

    /// Reports that a row begins.
    pub(crate) fn row(&self, title: &str) {
        progress::note(title);
        self.bar.doing(format!("{title}: preparing"));
    }

    /// Reports that a contestant's turn begins.
    pub(crate) fn turn(
        &self,
        title: &str,
        contestant: &str,
        turn: usize,
        warm_up: usize,
        repeats: usize,
    ) {
        let step = match turn.checked_sub(warm_up) {
            None => format!("warm-up {} of {warm_up}", turn + 1),
            Some(measured) => format!("step {} of {repeats}", measured + 1),
        };
        self.bar.doing(format!("{title}: {step}, {contestant}"));
    }

    /// Reports that a step begins, and about how many seconds remain until its table is done.
    pub(crate) fn step(&self, title: &str, what: &str, seconds: f64) {
        self.bar.doing(format!("{title}: {what}, about {seconds:.0} s until its table is done"));
    }

    /// Reports that some pieces are done.
    pub(crate) fn advance(&self, pieces: usize) {
        self.bar.advance(pieces);
    }

    /// Reports that the row is measured.
    pub(crate) fn done(&self) {
        self.bar.doing(String::new());
    }
}
