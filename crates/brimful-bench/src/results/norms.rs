//! Exact BatchNorms beside deferred ones, by the samples of a mini-batch.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::ResultRow;
use super::table::Form::{Bytes, Count, Number, Percent, Ratio, Text};
use super::table::{Table, TableColumn};

const COLUMNS: [TableColumn; 8] = [
    ("batch", "mini-batch", Count),
    ("contestant", "contestant", Text),
    ("samples_per_s", "samples/s", Number),
    ("ratio", ": deferred", Ratio(3)),
    ("spread", "spread", Percent(1)),
    ("peak_bytes", "peak MiB", Bytes),
    ("peak_ratio", ": first mini-batch's", Ratio(4)),
    ("first_step_s", "first step, s", Number),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    by_work::tables(rows, name, &COLUMNS, |row, _| vec![("first_step_s", row.first_step().into())])
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    by_work::panels(rows, name, "samples/s", |row| {
        [Bar::of_speed(row, format!("{}, {}", row.contestant(), row.text("batch")))]
    })
}

fn name(row: &ResultRow) -> String {
    let (model, within) = (row.model(), row.within());
    format!("{model}, micro-batches of {}{within}", row.text("micro_batch"))
}
