//! Text of unlike lengths, cut by tokens or by samples.

use super::chart::BarPanel;
use super::row::{ResultRow, grouped, over};
use super::table::{Table, TableCell, TableColumn, TableLine};
use super::token_rates;

const COLUMNS: [TableColumn; 8] = [
    ("contestant", "contestant"),
    ("seconds", "s a step"),
    ("tokens_per_s", "tokens/s"),
    ("ratio", "of by samples"),
    ("micro_batches", "micro-batches"),
    ("spread", "spread"),
    ("cpu_seconds", "CPU s a step"),
    ("cpu_ratio", "by samples' CPU s : own"),
];

/// What everything is measured against.
const BY_SAMPLES: &str = "brimful, by samples";

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |(title, of_work): (String, Vec<&ResultRow>)| {
        let by_samples = of_work.iter().find(|row| row.contestant() == BY_SAMPLES);
        let cpu_by_samples = by_samples.and_then(|row| row.number("cpu_seconds"));
        let by_samples = by_samples.and_then(|row| row.number("tokens_per_s"));
        let line = |row: &&ResultRow| {
            let rate = row.number("tokens_per_s");
            TableLine::Figures(vec![
                TableCell::text(row.contestant()),
                TableCell::Number(row.number("seconds")),
                TableCell::Count(rate),
                TableCell::Ratio(over(rate, by_samples), 2),
                TableCell::Count(row.number("micro_batches")),
                TableCell::Percent(row.number("spread"), 0),
                TableCell::Number(row.number("cpu_seconds")),
                TableCell::Ratio(over(cpu_by_samples, row.number("cpu_seconds")), 2),
            ])
        };
        Table { title, columns: COLUMNS.into(), lines: of_work.iter().map(line).collect() }
    };
    grouped(rows, name).into_iter().map(table).collect()
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    token_rates::panels(rows, name)
}

fn name(row: &ResultRow) -> String {
    format!(
        "GPT {}, {} texts of {} tokens, micro-batches of up to {}",
        row.text("shape"),
        row.text("batch"),
        row.text("tokens"),
        row.text("token_budget")
    )
}
