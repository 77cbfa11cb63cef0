//! Models that live on the host, beside the same ones on their device and what others make of them.

use super::chart::BarPanel;
use super::row::{ResultRow, grouped, over};
use super::table::{Table, TableCell, TableColumn};
use super::token_rates;

const COLUMNS: [TableColumn; 6] = [
    ("contestant", "contestant"),
    ("seconds", "s a step"),
    ("tokens_per_s", "tokens/s"),
    ("ratio", "of brimful on the card"),
    ("seconds_backward", "of it backward"),
    ("peak_bytes", "peak MiB"),
];

/// What everything is measured against.
const ON_THE_CARD: &str = "brimful, on the card";

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |(title, of_work): (String, Vec<&ResultRow>)| {
        let card = of_work.iter().find(|row| row.contestant() == ON_THE_CARD);
        let card = card.and_then(|row| row.number("tokens_per_s"));
        let line = |row: &&ResultRow| {
            let rate = row.number("tokens_per_s");
            row.line(|| {
                vec![
                    TableCell::Number(row.number("seconds")),
                    TableCell::Count(rate),
                    TableCell::Ratio(over(rate, card), 2),
                    TableCell::Number(row.number("seconds_backward")),
                    TableCell::Bytes(row.number("peak_bytes")),
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
    let limit = row.text("memory_limit");
    let within = if limit.is_empty() { String::new() } else { format!(" within {limit}") };
    format!(
        "GPT {}, {} micro-batches of {}{within}",
        row.text("shape"),
        row.text("micro_batches"),
        row.text("sequences")
    )
}
