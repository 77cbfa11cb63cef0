//! The largest models that fit, and what takes their memory.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, grouped, over};
use super::table::{Table, TableCell, TableColumn, TableLine};

const COLUMNS: [TableColumn; 10] = [
    ("experiment", "experiment"),
    ("model", "largest model"),
    ("parameters", "parameters"),
    ("ratio", "over the first"),
    ("published_ratio", "published"),
    ("recompute", "recompute"),
    ("resident_bytes", "parameters' MiB"),
    ("activation_bytes", "activations' MiB"),
    ("peak_bytes", "peak MiB"),
    ("planned", "planned : peak"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |(title, group): (String, Vec<&ResultRow>)| {
        let lines = group.iter().map(|row| line(row)).collect();
        Table { title, columns: COLUMNS.into(), lines }
    };
    grouped(rows, family).into_iter().map(table).collect()
}

/// Each experiment's ratio, with the published one as its mark.
pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let bar = |row: &&ResultRow| {
        let error = || row.error().unwrap_or("no figures").to_owned();
        Bar {
            label: format!("{}: {}", row.text("experiment"), row.text("model")),
            side: Side::Ours,
            value: row.number("ratio").ok_or_else(error),
            points: Vec::new(),
            mark: row.number("published_ratio"),
        }
    };
    let panel = |(title, group): (String, Vec<&ResultRow>)| {
        let (unit, mark) = ("parameters over those of the first", "published, of other cards");
        BarPanel { title, unit, bars: group.iter().map(bar).collect(), mark, is_zoomed: false }
    };
    grouped(rows, family).into_iter().map(panel).collect()
}

/// What a family's experiments have in common.
fn family(row: &ResultRow) -> String {
    let model = row.text("model");
    let name = model.split(':').next().unwrap_or_default();
    let mebibytes = row.number("limit_bytes").unwrap_or_default() / f64::from(1 << 20);
    format!("{name}, devices of {mebibytes:.0} MiB")
}

fn line(row: &ResultRow) -> TableLine {
    let experiment = TableCell::text(row.text("experiment"));
    if let Some(error) = row.error() {
        return TableLine::Failed(vec![experiment], error.to_owned());
    }
    let planned = row.numbers("planned_peaks").iter().sum();
    TableLine::Figures(vec![
        experiment,
        TableCell::text(row.text("model")),
        TableCell::Count(row.number("parameters")),
        TableCell::Ratio(row.number("ratio"), 1),
        TableCell::Ratio(row.number("published_ratio"), 1),
        TableCell::text(row.text("recompute")),
        TableCell::Bytes(row.number("resident_bytes")),
        TableCell::Bytes(row.number("activation_bytes")),
        TableCell::Bytes(row.number("peak_bytes")),
        TableCell::Ratio(over(Some(planned), row.number("peak_bytes")), 2),
    ])
}
