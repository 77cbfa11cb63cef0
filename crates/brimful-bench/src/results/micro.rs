//! Micro-batched training: every way to run the same work, and peaks by the number of micro-batches.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, best, over};
use super::table::Form::{Bytes, Count, Number, Percent, Ratio, Text};
use super::table::{Table, TableColumn};

const SPEED: [TableColumn; 9] = [
    ("contestant", "who", Text),
    ("samples_per_s", "samples/s", Number),
    ("over_loop", ": PyTorch loop", Ratio(3)),
    ("over_best_peer", ": best peer", Ratio(3)),
    ("over_tch_loop", ": tch loop", Ratio(3)),
    ("ratio_to_resident", ": on device", Ratio(3)),
    ("spread", "spread", Percent(1)),
    ("peak_bytes", "peak MiB", Bytes),
    ("first_step_s", "first step, s", Number),
];

const GROWTH: [TableColumn; 7] = [
    ("contestant", "who", Text),
    ("work", "model, micro-batch", Text),
    ("micro_batches", "micro-batches", Count),
    ("batch", "samples", Count),
    ("samples_per_s", "samples/s", Number),
    ("peak_bytes", "peak MiB", Bytes),
    ("ratio", "peak : that of 1 or 2", Ratio(4)),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let (grown, timed) = parts(rows);
    let mut tables = by_work::tables(&timed, work, &SPEED, |row, group| {
        let over_speed = |base| over(row.speed(), base).into();
        let of = |name: &str| {
            over_speed(
                group.iter().find(|row| row.contestant() == name).and_then(|row| row.speed()),
            )
        };
        let peers = group.iter().copied().filter(|row| row.side() == Side::Peer);
        vec![
            ("over_loop", of("PyTorch loop")),
            ("over_best_peer", over_speed(best(peers))),
            ("over_tch_loop", of("tch loop")),
            ("first_step_s", row.first_step().into()),
        ]
    });
    let title = "Memory and rate by the number of micro-batches in a mini-batch";
    tables.extend(by_work::tables(
        &grown,
        |_| title.to_owned(),
        &GROWTH,
        |row, _| vec![("work", cut(row).into())],
    ));
    tables
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let (grown, timed) = parts(rows);
    let mut panels =
        by_work::panels(&timed, work, "samples/s", |row| [Bar::of_speed(row, row.contestant())]);
    panels.extend(by_work::panels(&grown, cut, "peak MiB", |row| {
        let label = format!("{}, {} samples", row.contestant(), row.text("batch"));
        let mebibytes = row.figure("peak_bytes").map(|bytes| bytes / f64::from(1 << 20));
        [Bar { label, side: row.side(), value: mebibytes, points: Vec::new(), mark: None }]
    }));
    panels
}

/// Separates the rows of peaks from those of speeds.
fn parts<'a>(rows: &[&'a ResultRow]) -> (Vec<&'a ResultRow>, Vec<&'a ResultRow>) {
    rows.iter().partition(|row| row.has("micro_batches"))
}

fn work(row: &ResultRow) -> String {
    format!("{}, {} / {}", row.model(), row.text("batch"), row.text("micro_batch"))
}

fn cut(row: &ResultRow) -> String {
    format!("{}, {}", row.model(), row.text("micro_batch"))
}
