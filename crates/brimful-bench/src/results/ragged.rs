//! Texts of different lengths, cut by tokens or by samples.

use super::by_work;
use super::chart::BarPanel;
use super::row::{ResultRow, over};
use super::table::Form::{Count, Number, Percent, Ratio, Text};
use super::table::{Table, TableColumn};

const COLUMNS: [TableColumn; 8] = [
    ("contestant", "contestant", Text),
    ("seconds", "s a step", Number),
    ("tokens_per_s", "tokens/s", Count),
    ("ratio", "of by samples", Ratio(2)),
    ("micro_batches", "micro-batches", Count),
    ("spread", "spread", Percent(0)),
    ("cpu_seconds", "CPU s a step", Number),
    ("cpu_ratio", "by samples' CPU s : own", Ratio(2)),
];

/// Contestant that all others are measured against.
const BY_SAMPLES: &str = "brimful, by samples";

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    by_work::tables(rows, name, &COLUMNS, |row, group| {
        let by_samples = group.iter().find(|row| row.contestant() == BY_SAMPLES);
        let of = |key: &str| by_samples.and_then(|row| row.number(key));
        vec![
            ("ratio", over(row.number("tokens_per_s"), of("tokens_per_s")).into()),
            ("cpu_ratio", over(of("cpu_seconds"), row.number("cpu_seconds")).into()),
        ]
    })
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    by_work::token_panels(rows, name)
}

fn name(row: &ResultRow) -> String {
    let [shape, batch, tokens, most] = row.texts(["shape", "batch", "tokens", "token_budget"]);
    format!("GPT {shape}, {batch} texts of {tokens} tokens, micro-batches of up to {most}")
}
