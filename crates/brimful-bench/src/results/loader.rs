//! Images that come from a disk, beside who else brings them.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, grouped, over};
use super::table::{Table, TableCell, TableColumn};

const COLUMNS: [TableColumn; 4] = [
    ("contestant", "contestant"),
    ("images_per_s", "images/s"),
    ("spread", "spread"),
    ("ratio", "brimful over it"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |(title, of_work): (String, Vec<&ResultRow>)| {
        let ours = of_work.iter().find(|row| row.side() == Side::Ours);
        let ours = ours.and_then(|row| row.number("images_per_s"));
        let line = |row: &&ResultRow| {
            let rate = row.number("images_per_s");
            row.line(|| {
                vec![
                    TableCell::Count(rate),
                    TableCell::Percent(row.number("spread"), 0),
                    TableCell::Ratio(over(ours, rate), 2),
                ]
            })
        };
        Table { title, columns: COLUMNS.into(), lines: of_work.iter().map(line).collect() }
    };
    grouped(rows, name).into_iter().map(table).collect()
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let panel = |(title, of_work): (String, Vec<&ResultRow>)| {
        let bar = |row: &&ResultRow| {
            let rate = row.number("images_per_s")?;
            Some(Bar::of(row.contestant(), row.side(), rate))
        };
        let bars = of_work.iter().filter_map(bar).collect();
        BarPanel { title, unit: "images a second", bars, mark: "", is_zoomed: false }
    };
    grouped(rows, name).into_iter().map(panel).collect()
}

fn name(row: &ResultRow) -> String {
    format!(
        "{0}×{0} pixels, mini-batches of {1}, {2} workers",
        row.text("image"),
        row.text("batch"),
        row.text("workers")
    )
}
