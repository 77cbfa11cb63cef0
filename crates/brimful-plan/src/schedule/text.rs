//! Parses and prints actions as text: `2F0` for one; a schedule has a line for each device, a cell for each
//! action.
//!
//! Empty cells are idle ticks, so that a spreadsheet can keep its columns aligned; blank lines and lines
//! that begin with `#` are skipped.

use std::fmt;
use std::str::FromStr;

use super::{Action, ActionKind, Actions, MicroBatchId, ScheduleError, StageId};

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.micro_batch)
    }
}

impl FromStr for Action {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| ScheduleError::NotAnAction { text: excerpt(text) })
    }
}

fn parse(text: &str) -> Option<Action> {
    // The first byte that is not a digit is the letter, or the text is not an action: bytes beyond ASCII
    // are never a letter, so the slices below begin and end between characters.
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    let letter = char::from(text.as_bytes()[at]);
    let kind = ActionKind::ALL.into_iter().find(|kind| kind.letter() == letter)?;
    let stage = number(&text[..at])?;
    let micro_batch = number(&text[at + 1..])?;
    Some(Action::new(StageId(stage), kind, MicroBatchId(micro_batch)))
}

/// Parses digits only: `u32::from_str` would accept a sign too.
fn number(digits: &str) -> Option<u32> {
    let all_digits = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|_| all_digits)
}

/// Returns the start of an external text, short enough for an error message.
fn excerpt(text: &str) -> String {
    const LONGEST: usize = 24;
    let mut short: String = text.chars().take(LONGEST).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

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

/// Writes text that [`Actions::from_str`] parses.
impl fmt::Display for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for list in self.lists() {
            let cells: Vec<_> = list.iter().map(Action::to_string).collect();
            writeln!(f, "{}", cells.join(","))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trip() {
        for kind in ActionKind::ALL {
            let action = Action::new(StageId(12), kind, MicroBatchId(u32::MAX));
            assert_eq!(action.to_string().parse(), Ok(action));
        }
    }

    #[test]
    fn refuses_what_is_no_action() {
        for text in [
            "",
            "F",
            "2F",
            "F0",
            "2X0",
            "2f0",
            "+2F0",
            "2F+0",
            "2F-1",
            "2F0 ",
            "4294967296F0",
            "1é2",
        ] {
            assert!(text.parse::<Action>().is_err(), "{text}");
        }
        let error = "2X0".parse::<Action>().expect_err("no kind");
        assert_eq!(
            error.to_string(),
            "'2X0' is not an action: write stage, one of F B I W R, micro-batch, as in 2F0"
        );
    }
}
