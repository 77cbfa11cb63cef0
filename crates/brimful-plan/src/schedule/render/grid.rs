//! The text grid: a row for each device, a column for each tick.
//!
//! ```text
//! tick     0              5
//! stage 0  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0─── ·  B1─── …
//! ```
//!
//! Every action takes one tick and a whole backward two, whatever it costs: a grid is read, not
//! measured.

use std::fmt;

use super::super::{Action, ActionKind, Actions, Costs, Simulation, simulate};

/// A text grid that is being set up; show it with `Display`.
#[derive(Debug, Clone)]
pub struct Grid {
    labels: Vec<String>,
    rows: Vec<Vec<GridCell>>,
    /// Of a cell's text, without the gap to the next.
    cell_width: usize,
    color: bool,
    line_width: usize,
}

/// One device in one tick.
#[derive(Debug, Clone, Default)]
struct GridCell {
    text: String,
    kind: Option<ActionKind>,
    /// The action goes on in the next tick.
    goes_on: bool,
}

/// Draws the actions, one tick each.
#[must_use]
pub fn grid(actions: &Actions) -> Grid {
    let simulation = simulate(actions, &Costs::ticks(actions.stages()))
        .expect("ticks are finite, and there is one cost for each stage");
    let alone = actions.stages() == actions.devices();
    let rows: Vec<_> = (0..actions.devices()).map(|d| row(&simulation, d, alone)).collect();
    let widest = rows.iter().flatten().map(|cell| cell.text.len()).max();
    let word = if alone { "stage" } else { "device" };
    Grid {
        labels: (0..actions.devices()).map(|d| format!("{word} {d}")).collect(),
        rows,
        cell_width: widest.unwrap_or(1),
        color: false,
        line_width: usize::MAX,
    }
}

fn row(simulation: &Simulation, device: usize, alone: bool) -> Vec<GridCell> {
    let mut cells = vec![GridCell::default(); simulation.makespan() as usize];
    for span in &simulation.timeline()[device] {
        let (start, end) = (span.start as usize, span.end as usize);
        for cell in &mut cells[start..end] {
            cell.kind = Some(span.action.kind);
            cell.goes_on = true;
        }
        cells[end - 1].goes_on = false;
        cells[start].text = name(span.action, alone);
    }
    cells
}

/// A device with one stage need not say which.
fn name(action: Action, alone: bool) -> String {
    let full = action.to_string();
    if alone { full.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned() } else { full }
}

impl Grid {
    /// With colours, for a terminal that shows them.
    #[must_use]
    pub fn color(self, color: bool) -> Self {
        Self { color, ..self }
    }

    /// Folded into bands of ticks, so that no line is longer than `columns`.
    #[must_use]
    pub fn width(self, columns: usize) -> Self {
        Self { line_width: columns, ..self }
    }

    fn ticks(&self) -> usize {
        self.rows.first().map_or(0, Vec::len)
    }

    fn ticks_per_band(&self) -> usize {
        let room = self.line_width.saturating_sub(self.label_width() + 2);
        (room / (self.cell_width + 1)).max(1)
    }

    fn label_width(&self) -> usize {
        self.labels.iter().map(String::len).max().unwrap_or(0)
    }

    /// Every fifth tick's number, over its column.
    fn ruler(&self, from: usize, to: usize) -> String {
        let mut ruler = format!("{:<width$}  ", "tick", width = self.label_width());
        let start = ruler.len();
        for k in (from..to).filter(|k| k % 5 == 0) {
            let column = start + (k - from) * (self.cell_width + 1);
            ruler.push_str(&" ".repeat(column.saturating_sub(ruler.len())));
            ruler.push_str(&k.to_string());
        }
        ruler
    }

    fn line(&self, label: &str, cells: &[GridCell]) -> String {
        let mut line = format!("{label:<width$}  ", width = self.label_width());
        for cell in cells {
            line.push_str(&self.cell(cell));
        }
        line.trim_end().to_owned()
    }

    fn cell(&self, cell: &GridCell) -> String {
        let Some(kind) = cell.kind else {
            return format!("{:<width$} ", "·", width = self.cell_width);
        };
        let (fill, gap) =
            if cell.text.is_empty() || cell.goes_on { ('─', '─') } else { (' ', ' ') };
        let mut text = cell.text.clone();
        text.extend(std::iter::repeat_n(fill, self.cell_width - text.len()));
        let gap = if cell.goes_on { gap } else { ' ' };
        if self.color { paint(kind, &text, gap) } else { format!("{text}{gap}") }
    }
}

/// Coloured by kind; the gap belongs to the action only where it goes on.
fn paint(kind: ActionKind, text: &str, gap: char) -> String {
    let code = match kind {
        ActionKind::Forward => "34",
        ActionKind::Backward => "32",
        ActionKind::InputGradient => "36",
        ActionKind::WeightGradient => "35",
        ActionKind::Recompute => "33",
    };
    format!("\x1b[{code}m{text}{gap}\x1b[0m")
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for from in (0..self.ticks()).step_by(self.ticks_per_band()) {
            let to = from.saturating_add(self.ticks_per_band()).min(self.ticks());
            writeln!(f, "{}", self.ruler(from, to))?;
            for (label, row) in self.labels.iter().zip(&self.rows) {
                writeln!(f, "{}", self.line(label, &row[from..to]))?;
            }
        }
        Ok(())
    }
}
