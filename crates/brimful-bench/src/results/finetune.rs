//! Folders' models, fine-tuned on their device and from the host, beside what others make of them.

use super::chart::BarPanel;
use super::row::{ResultRow, grouped, over};
use super::table::{Table, TableCell, TableColumn};
use super::token_rates;

const COLUMNS: [TableColumn; 9] = [
    ("contestant", "contestant"),
    ("seconds", "s a step"),
    ("tokens_per_s", "tokens/s"),
    ("ratio", "first : it"),
    ("peak_bytes", "peak MiB"),
    ("first_loss", "first loss"),
    ("last_loss", "last loss"),
    ("seconds_load", "s to load"),
    ("host_of_weights", "host to load : weights"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |(title, of_work): (String, Vec<&ResultRow>)| {
        let first = of_work.first().and_then(|row| row.number("tokens_per_s"));
        let line = |row: &&ResultRow| {
            let rate = row.number("tokens_per_s");
            row.line(|| {
                vec![
                    TableCell::Number(row.number("seconds")),
                    TableCell::Count(rate),
                    TableCell::Ratio(over(first, rate), 2),
                    TableCell::Bytes(row.number("peak_bytes")),
                    TableCell::Ratio(row.number("first_loss"), 3),
                    TableCell::Ratio(row.number("last_loss"), 3),
                    TableCell::Number(row.number("seconds_load")),
                    TableCell::Ratio(row.number("host_of_weights"), 2),
                ]
            })
        };
        Table { title, columns: COLUMNS.into(), lines: of_work.iter().map(line).collect() }
    };
    grouped(rows, name).into_iter().map(table).collect()
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    token_rates::panels(rows, name)
}

fn name(row: &ResultRow) -> String {
    let (lora, limit) = (row.text("lora"), row.text("memory_limit"));
    let how = if lora.is_empty() { "whole".into() } else { format!("LoRA {lora}") };
    let within = if limit.is_empty() { String::new() } else { format!(" within {limit}") };
    format!(
        "{}, {how}, {} sequences of {} in micro-batches of {}{within}",
        row.text("model"),
        row.text("batch"),
        row.text("sequence"),
        row.text("micro_batch")
    )
}
