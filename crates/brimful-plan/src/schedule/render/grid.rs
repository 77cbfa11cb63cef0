//! Text grid: a row for each device, a column for each tick.
//!
//! ```text
//! tick     0              5
//! stage 0  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0─── ·  B1─── …
//! ```
//!
//! Every action takes one tick and a whole backward two, whatever its cost: the grid shows the order, not
//! times.

use std::fmt;

use super::super::{
    Action, ActionKind, Actions, CostError, Costs, HostLinkCost, HostLinkUse, Simulation, Span,
    StageCost, Transfer, TransferKind, TransferSpan, Transfers, simulate, simulate_transfers,
};

/// Text grid; its options are set first, then it is shown with `Display`.
#[derive(Debug, Clone)]
pub struct Grid {
    labels: Vec<String>,
    rows: Vec<Vec<GridCell>>,
    /// Width of a cell's text, without the gap to the next.
    cell_width: usize,
    color: bool,
    line_width: usize,
}

/// One device, or one direction of its host link, in one tick.
#[derive(Debug, Clone, Default)]
struct GridCell {
    text: String,
    /// Terminal colour code; `None` for an empty cell.
    color: Option<&'static str>,
    /// Whether the action continues in the next tick.
    goes_on: bool,
}

/// Draws the actions, one tick each.
#[must_use]
pub fn grid(actions: &Actions) -> Grid {
    let simulation = simulate(actions, &Costs::ticks(actions.stages()))
        .expect("ticks are finite, and there is one cost for each stage");
    Grid::new(actions, &simulation)
}

/// Draws actions and transfers, one tick each. Under each device are a row for transfers to it and a row for
/// transfers to the host. Weights and gradients are shown by their stage (`↓2`, `↑2`), boundaries by stage and
/// micro-batch (`↓2.0`).
///
/// # Errors
/// If the transfers do not belong to the actions.
pub fn grid_with_transfers(actions: &Actions, transfers: &Transfers) -> Result<Grid, CostError> {
    let one_byte = StageCost {
        fetched_bytes: 1,
        sent_bytes: 1,
        output_bytes: 1,
        ..StageCost::new(1.0, 1.0, 1.0)
    };
    // One byte per tick, so that every transfer takes exactly one tick.
    let host_link = HostLinkCost::equal(1.0);
    let costs = Costs { input_bytes: 1, host_link, ..Costs::equal(actions.stages(), one_byte) };
    Ok(Grid::new(actions, &simulate_transfers(actions, transfers, &costs)?))
}

fn device_row(ticks: usize, spans: &[Span], alone: bool) -> Vec<GridCell> {
    let mut cells = vec![GridCell::default(); ticks];
    for span in spans {
        fill(&mut cells, span.start, span.end, color(span.action.kind), name(span.action, alone));
    }
    cells
}

fn host_link_row(ticks: usize, spans: &[TransferSpan], inward: bool) -> Vec<GridCell> {
    let mut cells = vec![GridCell::default(); ticks];
    for span in spans.iter().filter(|span| span.transfer.kind.is_inward() == inward) {
        fill(
            &mut cells,
            span.start,
            span.end,
            transfer_color(span.transfer.kind),
            short_name(span.transfer),
        );
    }
    cells
}

fn fill(cells: &mut [GridCell], start: f64, end: f64, color: &'static str, text: String) {
    let (start, end) = (start as usize, end as usize);
    for cell in &mut cells[start..end] {
        cell.color = Some(color);
        cell.goes_on = true;
    }
    cells[end - 1].goes_on = false;
    cells[start].text = text;
}

fn short_name(transfer: Transfer) -> String {
    let arrow = if transfer.kind.is_inward() { '↓' } else { '↑' };
    let boundary =
        transfer.micro_batch.map_or(String::new(), |micro_batch| format!(".{micro_batch}"));
    format!("{arrow}{}{boundary}", transfer.stage)
}

/// Returns an action's text; without the stage if each device has only one.
fn name(action: Action, alone: bool) -> String {
    let full = action.to_string();
    if alone { full.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned() } else { full }
}

impl Grid {
    /// Draws a simulation with whole ticks.
    fn new(actions: &Actions, simulation: &Simulation) -> Self {
        let alone = actions.stages() == actions.devices();
        let word = if alone { "stage" } else { "device" };
        let ticks = simulation.makespan() as usize;
        let mut labels = Vec::new();
        let mut rows = Vec::new();
        for (d, spans) in simulation.timeline().iter().enumerate() {
            labels.push(format!("{word} {d}"));
            rows.push(device_row(ticks, spans, alone));
            // Without transfers there are no host links, and no rows for them.
            if let Some(HostLinkUse { transfers, .. }) = simulation.host_links().get(d) {
                labels.extend(["  in".to_owned(), "  out".to_owned()]);
                rows.extend([
                    host_link_row(ticks, transfers, true),
                    host_link_row(ticks, transfers, false),
                ]);
            }
        }
        let widest = rows.iter().flatten().map(|cell| cell.text.chars().count()).max();
        let cell_width = widest.unwrap_or(1);
        Self { labels, rows, cell_width, color: false, line_width: usize::MAX }
    }

    /// Sets whether to use terminal colours.
    #[must_use]
    pub fn color(self, color: bool) -> Self {
        Self { color, ..self }
    }

    /// Folds the grid into bands of ticks, so that no line is longer than `columns`.
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

    /// Returns the line with every fifth tick's number over its column.
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
        let Some(color) = cell.color else {
            return format!("{:<width$} ", "·", width = self.cell_width);
        };
        let fill = if cell.text.is_empty() || cell.goes_on { '─' } else { ' ' };
        let mut text = cell.text.clone();
        text.extend(std::iter::repeat_n(fill, self.cell_width - cell.text.chars().count()));
        // The gap belongs to the action only if it continues.
        let gap = if cell.goes_on { '─' } else { ' ' };
        if self.color { format!("\x1b[{color}m{text}{gap}\x1b[0m") } else { format!("{text}{gap}") }
    }
}

fn color(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::Forward => "34",
        ActionKind::Backward => "32",
        ActionKind::InputGradient => "36",
        ActionKind::WeightGradient => "35",
        ActionKind::Recompute => "33",
    }
}

fn transfer_color(kind: TransferKind) -> &'static str {
    match kind {
        TransferKind::Fetch | TransferKind::Release => "94",
        TransferKind::OffloadGradients => "92",
        TransferKind::FetchState | TransferKind::OffloadState => "95",
        TransferKind::BoundaryOut | TransferKind::BoundaryIn => "90",
        TransferKind::GradientOut | TransferKind::GradientIn => "93",
    }
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
