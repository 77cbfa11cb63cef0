//! Exact BatchNorms beside deferred ones, by the samples of a mini-batch.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, grouped};
use super::table::{Table, TableCell, TableColumn, TableLine};

const COLUMNS: [TableColumn; 8] = [
    ("batch", "mini-batch"),
    ("contestant", "contestant"),
    ("samples_per_s", "samples/s"),
    ("ratio", ": deferred"),
    ("spread", "spread"),
    ("peak_bytes", "peak MiB"),
    ("peak_ratio", ": first mini-batch's"),
    ("first_step_s", "first step, s"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let line = |row: &&ResultRow| {
        TableLine::Figures(vec![
            TableCell::Count(row.number("batch")),
            TableCell::text(row.contestant()),
            TableCell::Number(row.speed()),
            TableCell::Ratio(row.number("ratio"), 3),
            TableCell::Percent(row.number("spread"), 1),
            TableCell::Bytes(row.number("peak_bytes")),
            TableCell::Ratio(row.number("peak_ratio"), 4),
            TableCell::Number(row.numbers("warm_up_seconds").first().copied()),
        ])
    };
    let table = |(title, group): (String, Vec<&ResultRow>)| Table {
        title,
        columns: COLUMNS.into(),
        lines: group.iter().map(line).collect(),
    };
    grouped(rows, name).into_iter().map(table).collect()
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let panel = |(title, group): (String, Vec<&ResultRow>)| {
        let label = |row: &ResultRow| format!("{}, {}", row.contestant(), row.text("batch"));
        let bars = group.iter().map(|row| Bar::of_speed(row, label(row))).collect();
        BarPanel { title, unit: "samples/s", bars, mark: "", is_zoomed: false }
    };
    grouped(rows, name).into_iter().map(panel).collect()
}

fn name(row: &ResultRow) -> String {
    let limit = row.text("memory_limit");
    let within = if limit.is_empty() { String::new() } else { format!(" within {limit}") };
    format!("{}, micro-batches of {}{within}", row.model(), row.text("micro_batch"))
}
