//! The lists of an invalid schedule, with the offending cells in brackets.
//!
//! ```text
//! device 0   0F0   0F1   0B0   0B1
//! device 1   1F0  [1F0]  1B0   1B1
//! ```

use super::super::{Action, DeviceId};

/// A cell that breaks a rule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    pub(crate) device: DeviceId,
    pub(crate) position: usize,
    /// An action that ought to be there, shown after the device's last.
    missing: Option<Action>,
}

impl Mark {
    pub(crate) fn cell(device: DeviceId, position: usize) -> Self {
        Self { device, position, missing: None }
    }

    pub(crate) fn missing(device: DeviceId, action: Action) -> Self {
        Self { device, position: usize::MAX, missing: Some(action) }
    }
}

/// How much is shown around the first mark.
const ROWS: usize = 12;
const COLUMNS: usize = 16;

/// The part of the lists around the marks.
pub(crate) fn marked(lists: &[Vec<Action>], marks: &[Mark]) -> String {
    let centre = marks.first();
    let device = centre.map_or(0, |mark| mark.device.index());
    let rows = window(device, lists.len(), ROWS);
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    let position = centre.map_or(0, |mark| match mark.missing {
        Some(_) => lists[device].len(),
        None => mark.position,
    });
    let columns = window(position, longest + 1, COLUMNS);
    let lines = rows.map(|d| line(d, &lists[d], columns.clone(), marks));
    lines.collect::<Vec<_>>().join("\n")
}

/// At most `size` of `all`, around `centre`.
fn window(centre: usize, all: usize, size: usize) -> std::ops::Range<usize> {
    let start = centre.saturating_sub(size / 2).min(all.saturating_sub(size));
    start..all.min(start + size)
}

fn line(d: usize, list: &[Action], columns: std::ops::Range<usize>, marks: &[Mark]) -> String {
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
