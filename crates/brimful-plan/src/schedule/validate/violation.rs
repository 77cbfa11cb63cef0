//! Broken rules, shown with the offending cells in brackets.
//!
//! ```text
//! device 0   0F0   0F1   0B0   0B1
//! device 1   1F0  [1F0]  1B0   1B1
//! ```

use std::ops::Range;

use super::super::{Action, DeviceId, Rule, ScheduleError};

/// Broken rule and the cells that break it.
#[derive(Debug)]
pub(in super::super) struct Violation {
    pub(super) rule: Rule,
    pub(super) marks: Vec<MarkedCell>,
}

/// Cell that breaks a rule; a missing action's cell is after its device's last.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct MarkedCell {
    pub(in super::super) device: DeviceId,
    pub(in super::super) position: usize,
}

/// Number of devices and actions shown around the first mark: about as many as fit in a terminal.
const ROWS: usize = 12;
const COLUMNS: usize = 16;

impl Violation {
    pub(in super::super) fn at(rule: Rule, device: DeviceId, position: usize) -> Self {
        Self { rule, marks: vec![MarkedCell { device, position }] }
    }

    pub(in super::super) fn show(self, lists: &[Vec<Action>]) -> ScheduleError {
        let grid = self.marked(lists);
        ScheduleError::Invalid { rule: self.rule, grid }
    }

    /// Draws the part of the lists around the marks.
    fn marked(&self, lists: &[Vec<Action>]) -> String {
        let (device, position) =
            self.marks.first().map_or((0, 0), |mark| (mark.device.index(), mark.position));
        let rows = window(device, lists.len(), ROWS);
        let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
        // One column more than the longest list: a missing action is shown after its device's last.
        let columns = window(position, longest + 1, COLUMNS);
        let lines = rows.map(|d| self.line(d, &lists[d], columns.clone()));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn line(&self, d: usize, list: &[Action], columns: Range<usize>) -> String {
        let mut mine = self.marks.iter().filter(|mark| mark.device.index() == d);
        let mut line = format!("device {d:<3}");
        line.push_str(if columns.start > 0 { " … " } else { " " });
        for position in columns.clone() {
            let is_marked = mine.clone().any(|mark| mark.position == position);
            match list.get(position) {
                Some(action) if is_marked => line.push_str(&format!("[{action}] ")),
                Some(action) => line.push_str(&format!(" {action}  ")),
                None => break,
            }
        }
        if list.len() > columns.end {
            line.push('…');
        }
        if let (Rule::Missing(action), Some(_)) = (&self.rule, mine.next()) {
            line.push_str(&format!("[{action}?]"));
        }
        line.trim_end().to_owned()
    }
}

/// Returns at most `size` of `all`, around `centre`.
fn window(centre: usize, all: usize, size: usize) -> Range<usize> {
    let start = centre.saturating_sub(size / 2).min(all.saturating_sub(size));
    start..all.min(start + size)
}
