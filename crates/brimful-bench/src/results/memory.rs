//! Largest models that fit, and the use of their memory.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, over};
use super::table::Form::{Bytes, Count, Ratio, Text};
use super::table::{Table, TableColumn};

const COLUMNS: [TableColumn; 10] = [
    ("experiment", "experiment", Text),
    ("model", "largest model", Text),
    ("parameters", "parameters", Count),
    ("ratio", "over the first", Ratio(1)),
    ("published_ratio", "published", Ratio(1)),
    ("recompute", "recompute", Text),
    ("resident_bytes", "parameters' MiB", Bytes),
    ("activation_bytes", "activations' MiB", Bytes),
    ("peak_bytes", "peak MiB", Bytes),
    ("planned", "planned : peak", Ratio(2)),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    by_work::tables(rows, family, &COLUMNS, |row, _| {
        let planned = row.numbers("planned_peaks").iter().sum();
        vec![("planned", over(Some(planned), row.number("peak_bytes")).into())]
    })
}

/// Draws each experiment's ratio, with the published one as its mark.
pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let unit = "parameters over those of the first";
    let mut panels = by_work::panels(rows, family, unit, |row| {
        [Bar {
            label: format!("{}: {}", row.text("experiment"), row.text("model")),
            side: Side::Ours,
            value: row.figure("ratio"),
            points: Vec::new(),
            mark: row.number("published_ratio"),
        }]
    });
    panels.iter_mut().for_each(|panel| panel.mark = "published, of other GPUs");
    panels
}

/// Returns the common heading of a family's experiments.
fn family(row: &ResultRow) -> String {
    let model = row.text("model");
    let name = model.split(':').next().unwrap_or_default();
    let mebibytes = row.number("limit_bytes").unwrap_or_default() / f64::from(1 << 20);
    format!("{name}, devices of {mebibytes:.0} MiB")
}
