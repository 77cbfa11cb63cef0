//! What is measured now, on standard error: a bar on a terminal, else a line a row.

use brimful_cli::progress;

/// Tells a waiting person what runs, and for how long.
#[derive(Debug)]
pub(crate) struct TurnProgress {
    bar: progress::Progress,
}

impl TurnProgress {
    /// For work of so many pieces of about the same length.
    pub(crate) fn new(pieces: usize) -> Self {
        Self { bar: progress::Progress::new(pieces, "turns") }
    }

    /// A row begins.
    pub(crate) fn row(&self, title: &str) {
        progress::note(title);
        self.bar.doing(format!("{title}: preparing"));
    }

    /// A contestant's turn begins.
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

    /// A step begins; about so many seconds will go by until all of its table is done.
    pub(crate) fn step(&self, title: &str, what: &str, seconds: f64) {
        self.bar.doing(format!("{title}: {what}, about {seconds:.0} s until its table is done"));
    }

    /// Some pieces of the work are done.
    pub(crate) fn advance(&self, pieces: usize) {
        self.bar.advance(pieces);
    }

    /// The row is measured.
    pub(crate) fn done(&self) {
        self.bar.doing(String::new());
    }
}
