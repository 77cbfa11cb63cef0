//! Offloaded models, beside the same models on their device and beside the peers.

use super::by_work;
use super::chart::BarPanel;
use super::row::{ResultRow, over};
use super::table::Form::{Bytes, Count, Number, Ratio, Text};
use super::table::{Table, TableColumn};

const COLUMNS: [TableColumn; 6] = [
    ("contestant", "contestant", Text),
    ("seconds", "s a step", Number),
    ("tokens_per_s", "tokens/s", Count),
    ("ratio", "of brimful on the GPU", Ratio(2)),
    ("seconds_backward", "of it backward", Number),
    ("peak_bytes", "peak MiB", Bytes),
];

/// Contestant that all others are measured against.
const ON_THE_GPU: [&str; 2] = ["brimful, on the GPU", "brimful, on the card"];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    by_work::tables(rows, name, &COLUMNS, |row, group| {
        let gpu = group.iter().find(|row| ON_THE_GPU.contains(&row.contestant().as_str()));
        let gpu = gpu.and_then(|row| row.number("tokens_per_s"));
        vec![("ratio", over(row.number("tokens_per_s"), gpu).into())]
    })
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    by_work::token_panels(rows, name)
}

fn name(row: &ResultRow) -> String {
    let [shape, count, sequences] = row.texts(["shape", "micro_batches", "sequences"]);
    format!("GPT {shape}, {count} micro-batches of {sequences}{}", row.within())
}
