//! Micro-batched training: every way to run the same work, and peaks by the number of micro-batches.

use super::chart::{Bar, Panel};
use super::row::{Row, Side, best, grouped, over};
use super::table::{Cell, Column, Line, Table};

const SPEED: [Column; 8] = [
    ("contestant", "who"),
    ("samples_per_s", "samples/s"),
    ("over_loop", ": PyTorch loop"),
    ("over_best_peer", ": best peer"),
    ("over_tch_loop", ": tch loop"),
    ("spread", "spread"),
    ("peak_bytes", "peak MiB"),
    ("first_step_s", "first step, s"),
];

const GROWTH: [Column; 7] = [
    ("work", "peak MiB by micro-batches in a mini-batch"),
    ("peak_1", "1"),
    ("peak_2", "2"),
    ("peak_64", "64"),
    ("peak_128", "128"),
    ("ratio_64", "64 : 1"),
    ("ratio_128", "128 : 2"),
];

pub(super) fn tables(rows: &[&Row]) -> Vec<Table> {
    let (grown, timed): (Vec<&Row>, Vec<&Row>) =
        rows.iter().partition(|row| row.has("micro_batches"));
    let mut tables: Vec<Table> =
        grouped(&timed, work).into_iter().map(|(title, group)| speed(title, &group)).collect();
    if !grown.is_empty() {
        tables.push(growth(&grown));
    }
    tables
}

pub(super) fn panels(rows: &[&Row]) -> Vec<Panel> {
    let timed: Vec<&Row> = rows.iter().filter(|row| !row.has("micro_batches")).copied().collect();
    let panel = |(title, group): (String, Vec<&Row>)| {
        let bars = group.iter().map(|row| Bar::of_speed(row, row.contestant())).collect();
        Panel { title, unit: "samples/s", bars, mark: "", is_zoomed: false }
    };
    grouped(&timed, work).into_iter().map(panel).collect()
}

fn work(row: &Row) -> String {
    format!("{}, {} / {}", row.model(), row.text("batch"), row.text("micro_batch"))
}

fn speed(title: String, group: &[&Row]) -> Table {
    let of =
        |name: &str| group.iter().find(|row| row.contestant() == name).and_then(|row| row.speed());
    let peers = group.iter().copied().filter(|row| row.side() == Side::Peer);
    let (loop_, tch, peer) = (of("PyTorch loop"), of("tch loop"), best(peers));
    let line = |row: &&Row| {
        let name = Cell::text(row.contestant());
        if let Some(error) = row.error() {
            return Line::Failed(vec![name], error.to_owned());
        }
        let first = row.numbers("warm_up_seconds").first().copied();
        Line::Figures(vec![
            name,
            Cell::Number(row.speed()),
            Cell::Ratio(over(row.speed(), loop_), 3),
            Cell::Ratio(over(row.speed(), peer), 3),
            Cell::Ratio(over(row.speed(), tch), 3),
            Cell::Percent(row.number("spread"), 1),
            Cell::Bytes(row.number("peak_bytes")),
            Cell::Number(first),
        ])
    };
    Table { title, columns: SPEED.into(), lines: group.iter().map(line).collect() }
}

fn growth(rows: &[&Row]) -> Table {
    let line = |(name, group): (String, Vec<&Row>)| {
        let peak = |count: f64| {
            let row = group.iter().find(|row| row.number("micro_batches") == Some(count))?;
            row.number("peak_bytes")
        };
        let peaks = [1.0, 2.0, 64.0, 128.0].map(peak);
        let mut cells = vec![Cell::text(name)];
        cells.extend(peaks.map(Cell::Bytes));
        cells.push(Cell::Ratio(over(peaks[2], peaks[0]), 4));
        cells.push(Cell::Ratio(over(peaks[3], peaks[1]), 4));
        Line::Figures(cells)
    };
    let work = |row: &Row| format!("{}, {}", row.model(), row.text("micro_batch"));
    let lines = grouped(rows, work).into_iter().map(line).collect();
    Table { title: "Memory".to_owned(), columns: GROWTH.into(), lines }
}
