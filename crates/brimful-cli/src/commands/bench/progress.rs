//! What is measured now, on standard error: a bar on a terminal, else a line a row.

use std::cell::RefCell;

use crate::progress;

/// Tells a waiting person what runs.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The row that is measured.
    row: RefCell<Option<progress::Progress>>,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// A row begins.
    pub(super) fn row(&self, title: &str) {
        progress::note(title);
        let row = progress::Progress::new(1, "turns");
        row.doing(format!("{title}: preparing"));
        *self.row.borrow_mut() = Some(row);
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
        let step = match turn.checked_sub(warm_up) {
            None => format!("warm-up {} of {warm_up}", turn + 1),
            Some(measured) => format!("step {} of {repeats}", measured + 1),
        };
        if let Some(row) = &*self.row.borrow() {
            row.at(turn, warm_up + repeats, format!("{title}: {step}, {contestant}"));
        }
    }

    /// A step begins; about so many seconds will go by until all of its table is done.
    pub(super) fn step(&self, title: &str, what: &str, seconds: f64) {
        if let Some(row) = &*self.row.borrow() {
            row.doing(format!("{title}: {what}, about {seconds:.0} s until the table is done"));
        }
    }

    /// The row is measured: makes room for its figures.
    pub(super) fn done(&self) {
        self.row.borrow_mut().take();
    }
}
