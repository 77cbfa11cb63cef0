//! Table and panel for each piece of work, with its rows.

use std::collections::BTreeMap;

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, grouped};
use super::table::{Table, TableCell, TableColumn, TableLine};

/// Cells that a row does not contain itself, by the key of their column.
pub(super) type Derived = Vec<(&'static str, TableCell)>;

/// Makes tables with a line for each row; other cells are derived from the row and all rows of its work.
pub(super) fn tables(
    rows: &[&ResultRow],
    work: impl Fn(&ResultRow) -> String,
    columns: &[TableColumn],
    derived: impl Fn(&ResultRow, &[&ResultRow]) -> Derived,
) -> Vec<Table> {
    let table = |(title, group): (String, Vec<&ResultRow>)| {
        let line = |row: &&ResultRow| {
            let mut cells = cells(row, columns, derived(row, &group));
            let error = row.error().map(str::to_owned);
            if error.is_some() {
                cells.truncate(1);
            }
            TableLine { cells, error }
        };
        let lines = group.iter().map(line).collect();
        Table { title, columns: columns.to_vec(), lines }
    };
    grouped(rows, work).into_iter().map(table).collect()
}

/// Returns the cell of each column.
pub(super) fn cells(row: &ResultRow, columns: &[TableColumn], derived: Derived) -> Vec<TableCell> {
    let mut derived: BTreeMap<&str, TableCell> = derived.into_iter().collect();
    let cell =
        |(key, _, form): &TableColumn| derived.remove(key).unwrap_or_else(|| form.own(row, key));
    columns.iter().map(cell).collect()
}

/// Makes panels with the bars of each row.
pub(super) fn panels<Bars: IntoIterator<Item = Bar>>(
    rows: &[&ResultRow],
    work: impl Fn(&ResultRow) -> String,
    unit: &'static str,
    bars: impl Fn(&ResultRow) -> Bars,
) -> Vec<BarPanel> {
    let panel = |(title, group): (String, Vec<&ResultRow>)| {
        let bars = group.into_iter().flat_map(&bars).collect();
        BarPanel { title, unit, bars, ..BarPanel::default() }
    };
    grouped(rows, work).into_iter().map(panel).collect()
}

/// Makes panels of each contestant's tokens per second.
pub(super) fn token_panels(
    rows: &[&ResultRow],
    work: impl Fn(&ResultRow) -> String,
) -> Vec<BarPanel> {
    panels(rows, work, "tokens a second", |row| Bar::under("tokens_per_s", row))
}
