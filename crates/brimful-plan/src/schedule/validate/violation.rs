//! A broken rule, and the lists with the offending cells in brackets.
//!
//! ```text
//! device 0   0F0   0F1   0B0   0B1
//! device 1   1F0  [1F0]  1B0   1B1
//! ```

use std::ops::Range;

use super::super::{Action, DeviceId, Rule, ScheduleError};

/// A broken rule and the cells that break it.
#[derive(Debug)]
pub(in super::super) struct Violation {
    pub(super) rule: Rule,
    pub(super) marks: Vec<MarkedCell>,
}

impl Violation {
    pub(in super::super) fn at(rule: Rule, mark: MarkedCell) -> Self {
        Self { rule, marks: vec![mark] }
    }

    pub(in super::super) fn show(self, lists: &[Vec<Action>]) -> ScheduleError {
        ScheduleError::Invalid { rule: self.rule, grid: marked(lists, &self.marks) }
    }
}

/// A cell that breaks a rule.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct MarkedCell {
    pub(in super::super) device: DeviceId,
    pub(in super::super) position: usize,
    /// An action that ought to be there, shown after the device's last.
    missing: Option<Action>,
}

impl MarkedCell {
    pub(in super::super) fn cell(device: DeviceId, position: usize) -> Self {
        Self { device, position, missing: None }
    }

    pub(in super::super) fn missing(device: DeviceId, action: Action) -> Self {
        Self { device, position: usize::MAX, missing: Some(action) }
    }
}

/// Devices and actions that are shown around the first mark: about what a terminal has room for.
const ROWS: usize = 12;
const COLUMNS: usize = 16;

/// The part of the lists around the marks.
fn marked(lists: &[Vec<Action>], marks: &[MarkedCell]) -> String {
    let centre = marks.first();
    let device = centre.map_or(0, |mark| mark.device.index());
    let rows = window(device, lists.len(), ROWS);
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    let position = centre.map_or(0, |mark| match mark.missing {
        Some(_) => lists[device].len(),
        None => mark.position,
    });
    // One column more than the longest list: a missing action is shown behind its device's last.
    let columns = window(position, longest + 1, COLUMNS);
    let lines = rows.map(|d| line(d, &lists[d], columns.clone(), marks));
    lines.collect::<Vec<_>>().join("\n")
}

/// At most `size` of `all`, around `centre`.
fn window(centre: usize, all: usize, size: usize) -> Range<usize> {
    let start = centre.saturating_sub(size / 2).min(all.saturating_sub(size));
    start..all.min(start + size)
}

fn line(d: usize, list: &[Action], columns: Range<usize>, marks: &[MarkedCell]) -> String {
    let mine = || marks.iter().filter(|mark| mark.device.index() == d);
    let mut line = format!("device {d:<3}");
    line.push_str(if columns.start > 0 { " … " } else { " " });
    for position in columns.clone() {
        let is_marked = mine().any(|mark| mark.position == position);
        match list.get(position) {
            Some(action) if is_marked => line.push_str(&format!("[{action}] ")),
            Some(action) => line.push_str(&format!(" {action}  ")),
            None => break,
        }
    }
    if list.len() > columns.end {
        line.push('…');
    }
    for action in mine().filter_map(|mark| mark.missing) {
        line.push_str(&format!("[{action}?]"));
    }
    line.trim_end().to_owned()
}
