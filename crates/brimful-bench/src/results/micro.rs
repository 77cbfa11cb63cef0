//! Micro-batched training: every way to run the same work, and peaks by the number of micro-batches.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, best, grouped, over};
use super::table::{Table, TableCell, TableColumn, TableLine};

const SPEED: [TableColumn; 9] = [
    ("contestant", "who"),
    ("samples_per_s", "samples/s"),
    ("over_loop", ": PyTorch loop"),
    ("over_best_peer", ": best peer"),
    ("over_tch_loop", ": tch loop"),
    ("ratio_to_resident", ": on device"),
    ("spread", "spread"),
    ("peak_bytes", "peak MiB"),
    ("first_step_s", "first step, s"),
];

const GROWTH: [TableColumn; 6] = [
    ("work", "model, micro-batch"),
    ("micro_batches", "micro-batches"),
    ("batch", "samples"),
    ("samples_per_s", "samples/s"),
    ("peak_bytes", "peak MiB"),
    ("ratio", "peak : that of 1 or 2"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let (grown, timed): (Vec<&ResultRow>, Vec<&ResultRow>) =
        rows.iter().partition(|row| row.has("micro_batches"));
    let mut tables: Vec<Table> =
        grouped(&timed, work).into_iter().map(|(title, group)| speed(title, &group)).collect();
    if !grown.is_empty() {
        tables.push(growth(&grown));
    }
    tables
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let (grown, timed): (Vec<&ResultRow>, Vec<&ResultRow>) =
        rows.iter().partition(|row| row.has("micro_batches"));
    let panel = |(title, group): (String, Vec<&ResultRow>)| {
        let bars = group.iter().map(|row| Bar::of_speed(row, row.contestant())).collect();
        BarPanel { title, unit: "samples/s", bars, mark: "", is_zoomed: false }
    };
    let speeds = grouped(&timed, work).into_iter().map(panel);
    let panel = |(title, group): (String, Vec<&ResultRow>)| {
        let bar = |row: &&ResultRow| {
            let label = format!("{} micro-batches", row.text("micro_batches"));
            let mebibytes = row.number("peak_bytes").unwrap_or_default() / f64::from(1 << 20);
            Bar::of(label, row.side(), mebibytes)
        };
        let bars = group.iter().map(bar).collect();
        BarPanel { title, unit: "peak MiB", bars, mark: "", is_zoomed: false }
    };
    speeds.chain(grouped(&grown, cut).into_iter().map(panel)).collect()
}

fn work(row: &ResultRow) -> String {
    format!("{}, {} / {}", row.model(), row.text("batch"), row.text("micro_batch"))
}

fn cut(row: &ResultRow) -> String {
    format!("{}, {}", row.model(), row.text("micro_batch"))
}

fn speed(title: String, group: &[&ResultRow]) -> Table {
    let of =
        |name: &str| group.iter().find(|row| row.contestant() == name).and_then(|row| row.speed());
    let peers = group.iter().copied().filter(|row| row.side() == Side::Peer);
    let pytorch = of("PyTorch loop");
    let tch = of("tch loop");
    let peer = best(peers);
    let line = |row: &&ResultRow| {
        let first = row.numbers("warm_up_seconds").first().copied();
        row.line(|| {
            vec![
                TableCell::Number(row.speed()),
                TableCell::Ratio(over(row.speed(), pytorch), 3),
                TableCell::Ratio(over(row.speed(), peer), 3),
                TableCell::Ratio(over(row.speed(), tch), 3),
                TableCell::Ratio(row.number("ratio_to_resident"), 3),
                TableCell::Percent(row.number("spread"), 1),
                TableCell::Bytes(row.number("peak_bytes")),
                TableCell::Number(first),
            ]
        })
    };
    Table { title, columns: SPEED.into(), lines: group.iter().map(line).collect() }
}

fn growth(rows: &[&ResultRow]) -> Table {
    let line = |row: &&ResultRow| {
        TableLine::Figures(vec![
            TableCell::Text(cut(row)),
            TableCell::Count(row.number("micro_batches")),
            TableCell::Count(row.number("batch")),
            TableCell::Number(row.speed()),
            TableCell::Bytes(row.number("peak_bytes")),
            TableCell::Ratio(row.number("ratio"), 4),
        ])
    };
    let title = "Memory and rate by the number of micro-batches in a mini-batch".to_owned();
    Table { title, columns: GROWTH.into(), lines: rows.iter().map(line).collect() }
}
