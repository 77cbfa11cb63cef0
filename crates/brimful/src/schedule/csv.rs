//! Actions as text: a line for each device, a cell for each action.
//!
//! Empty cells are idle ticks, so that a spreadsheet can keep its columns aligned; lines that are
//! blank or begin with `#` are skipped.

use std::fmt;
use std::str::FromStr;

use super::{Action, Actions, ScheduleError};

impl FromStr for Actions {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let lines = text.lines().enumerate().filter(|(_, line)| holds_cells(line));
        let lists: Result<_, _> = lines.map(|(at, line)| read_line(at + 1, line)).collect();
        Actions::new(lists?)
    }
}

fn holds_cells(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with('#')
}

fn read_line(line: usize, text: &str) -> Result<Vec<Action>, ScheduleError> {
    let cells = text.split(',').map(str::trim).enumerate();
    let used = cells.filter(|(_, cell)| !cell.is_empty());
    used.map(|(at, cell)| read_cell(line, at + 1, cell)).collect()
}

fn read_cell(line: usize, cell: usize, text: &str) -> Result<Action, ScheduleError> {
    text.parse().map_err(|source| ScheduleError::Csv { line, cell, source: Box::new(source) })
}

/// Writes what [`Actions::from_str`] reads.
impl fmt::Display for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for list in self.lists() {
            let mut separator = "";
            for action in list {
                write!(f, "{separator}{action}")?;
                separator = ",";
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
