//! What counting memory costs.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side};
use super::table::{Table, TableCell, TableColumn, TableLine};

const COLUMNS: [TableColumn; 6] = [
    ("images", "images"),
    ("seconds_without", "without, s"),
    ("seconds_with", "with an arena, s"),
    ("ratio", "ratio"),
    ("allocations", "allocations"),
    ("peak_bytes", "peak MiB"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let line = |row: &&ResultRow| {
        TableLine::Figures(vec![
            TableCell::text(work(row)),
            TableCell::Number(row.number("seconds_without")),
            TableCell::Number(row.number("seconds_with")),
            TableCell::Ratio(row.number("ratio"), 3),
            TableCell::Count(row.number("allocations")),
            TableCell::Bytes(row.number("peak_bytes")),
        ])
    };
    let title = "A training step with an arena and with libtorch's own allocator".to_owned();
    vec![Table { title, columns: COLUMNS.into(), lines: rows.iter().map(line).collect() }]
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let panel = |row: &&ResultRow| {
        let bar = |label: &str, side, key| {
            row.number(key).map(|seconds| Bar::of(label.to_owned(), side, seconds))
        };
        let bars = [
            bar("libtorch's allocator", Side::Reference, "seconds_without"),
            bar("with an arena", Side::Ours, "seconds_with"),
        ];
        let bars = bars.into_iter().flatten().collect();
        BarPanel { title: work(row), unit: "seconds a step", bars, mark: "", is_zoomed: false }
    };
    rows.iter().map(panel).collect()
}

fn work(row: &ResultRow) -> String {
    format!("{}, {} images, {} threads", row.model(), row.text("batch"), row.text("threads"))
}
