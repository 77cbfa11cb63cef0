//! Fine-tuned models of folders, on their device and offloaded, beside the peers.

use super::by_work;
use super::chart::BarPanel;
use super::row::{ResultRow, over};
use super::table::Form::{Bytes, Count, Number, Ratio, Text};
use super::table::{Table, TableColumn};

const COLUMNS: [TableColumn; 9] = [
    ("contestant", "contestant", Text),
    ("seconds", "s a step", Number),
    ("tokens_per_s", "tokens/s", Count),
    ("ratio", "first : it", Ratio(2)),
    ("peak_bytes", "peak MiB", Bytes),
    ("first_loss", "first loss", Ratio(3)),
    ("last_loss", "last loss", Ratio(3)),
    ("seconds_load", "s to load", Number),
    ("host_of_weights", "host to load : weights", Ratio(2)),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    by_work::tables(rows, name, &COLUMNS, |row, group| {
        let [first, rate] = [group[0], row].map(|row| row.number("tokens_per_s"));
        vec![("ratio", over(first, rate).into())]
    })
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    by_work::token_panels(rows, name)
}

fn name(row: &ResultRow) -> String {
    let [model, lora] = row.texts(["model", "lora"]);
    let how = if lora.is_empty() { "whole".into() } else { format!("LoRA {lora}") };
    let [batch, sequence, micro_batch] = row.texts(["batch", "sequence", "micro_batch"]);
    let within = row.within();
    format!(
        "{model}, {how}, {batch} sequences of {sequence} in micro-batches of {micro_batch}{within}"
    )
}
