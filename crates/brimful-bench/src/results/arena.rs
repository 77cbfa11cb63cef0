//! What counting memory costs.

use super::chart::{Bar, Panel};
use super::row::{ResultRow, Side};
use super::table::{Cell, Column, Table, TableLine};

const COLUMNS: [Column; 5] = [
    ("images", "images"),
    ("seconds_without", "without, s"),
    ("seconds_with", "with an arena, s"),
    ("ratio", "ratio"),
    ("allocations", "allocations"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let line = |row: &&ResultRow| {
        TableLine::Figures(vec![
            Cell::text(work(row)),
            Cell::Number(row.number("seconds_without")),
            Cell::Number(row.number("seconds_with")),
            Cell::Ratio(row.number("ratio"), 3),
            Cell::Count(row.number("allocations")),
        ])
    };
    let title = "A training step with an arena and with libtorch's own allocator".to_owned();
    vec![Table { title, columns: COLUMNS.into(), lines: rows.iter().map(line).collect() }]
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<Panel> {
    let panel = |row: &&ResultRow| {
        let bar = |label: &str, side, key| {
            row.number(key).map(|seconds| Bar::of(label.to_owned(), side, seconds))
        };
        let bars = [
            bar("libtorch's allocator", Side::Reference, "seconds_without"),
            bar("with an arena", Side::Ours, "seconds_with"),
        ];
        let bars = bars.into_iter().flatten().collect();
        Panel { title: work(row), unit: "seconds a step", bars, mark: "", is_zoomed: false }
    };
    rows.iter().map(panel).collect()
}

fn work(row: &ResultRow) -> String {
    format!("{}, {} images, {} threads", row.model(), row.text("batch"), row.text("threads"))
}
