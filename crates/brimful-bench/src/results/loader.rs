//! Images that come from a disk, beside who else brings them.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, works};
use super::table::{Table, TableCell, TableColumn, TableLine};

const COLUMNS: [TableColumn; 4] = [
    ("contestant", "contestant"),
    ("images_per_s", "images/s"),
    ("spread", "spread"),
    ("ratio", "brimful over it"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |work: String| {
        let of_work: Vec<_> = rows.iter().filter(|row| name(row) == work).collect();
        let ours = of_work.iter().find(|row| row.side() == Side::Ours);
        let ours = ours.and_then(|row| row.number("images_per_s"));
        let line = |row: &&&ResultRow| match row.error() {
            Some(error) => {
                TableLine::Failed(vec![TableCell::text(row.contestant())], error.to_owned())
            }
            None => {
                let rate = row.number("images_per_s");
                TableLine::Figures(vec![
                    TableCell::text(row.contestant()),
                    TableCell::Count(rate),
                    TableCell::Percent(row.number("spread"), 0),
                    TableCell::Ratio(ours.zip(rate).map(|(ours, rate)| ours / rate), 2),
                ])
            }
        };
        let lines = of_work.iter().map(line).collect();
        Table { title: work, columns: COLUMNS.into(), lines }
    };
    works(rows, name).into_iter().map(table).collect()
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let panel = |work: String| {
        let bar = |row: &&ResultRow| {
            let rate = row.number("images_per_s")?;
            Some(Bar::of(row.contestant(), row.side(), rate))
        };
        let bars = rows.iter().filter(|row| name(row) == work).filter_map(bar).collect();
        BarPanel { title: work, unit: "images a second", bars, mark: "", is_zoomed: false }
    };
    works(rows, name).into_iter().map(panel).collect()
}

fn name(row: &ResultRow) -> String {
    format!(
        "{0}×{0} pixels, mini-batches of {1}, {2} workers",
        row.text("image"),
        row.text("batch"),
        row.text("workers")
    )
}
