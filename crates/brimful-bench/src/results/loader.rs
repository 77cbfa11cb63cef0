//! Rates of image loading from a disk, beside the peers.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, over};
use super::table::Form::{Count, Percent, Ratio, Text};
use super::table::{Table, TableColumn};

const COLUMNS: [TableColumn; 4] = [
    ("contestant", "contestant", Text),
    ("images_per_s", "images/s", Count),
    ("spread", "spread", Percent(0)),
    ("ratio", "brimful over it", Ratio(2)),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    by_work::tables(rows, name, &COLUMNS, |row, group| {
        let ours = group.iter().find(|row| row.side() == Side::Ours);
        let ours = ours.and_then(|row| row.number("images_per_s"));
        vec![("ratio", over(ours, row.number("images_per_s")).into())]
    })
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    by_work::panels(rows, name, "images a second", |row| Bar::under("images_per_s", row))
}

fn name(row: &ResultRow) -> String {
    let [image, batch, workers] = row.texts(["image", "batch", "workers"]);
    format!("{image}×{image} pixels, mini-batches of {batch}, {workers} workers")
}
