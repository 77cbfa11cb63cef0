//! Cost of memory accounting.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side};
use super::table::Form::{Bytes, Count, Number, Ratio, Text};
use super::table::{Table, TableColumn};

const COLUMNS: [TableColumn; 6] = [
    ("images", "images", Text),
    ("seconds_without", "without, s", Number),
    ("seconds_with", "with an arena, s", Number),
    ("ratio", "ratio", Ratio(3)),
    ("allocations", "allocations", Count),
    ("peak_bytes", "peak MiB", Bytes),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let title = "A training step with an arena and with libtorch's own allocator";
    by_work::tables(
        rows,
        |_| title.to_owned(),
        &COLUMNS,
        |row, _| vec![("images", work(row).into())],
    )
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let bars = |row: &ResultRow| {
        let bar =
            |label: &str, side, key| row.number(key).map(|seconds| Bar::of(label, side, seconds));
        let bars = [
            bar("libtorch's allocator", Side::Reference, "seconds_without"),
            bar("with an arena", Side::Ours, "seconds_with"),
        ];
        bars.into_iter().flatten()
    };
    rows.chunks(1).flat_map(|row| by_work::panels(row, work, "seconds a step", bars)).collect()
}

fn work(row: &ResultRow) -> String {
    format!("{}, {} images, {} threads", row.model(), row.text("batch"), row.text("threads"))
}
