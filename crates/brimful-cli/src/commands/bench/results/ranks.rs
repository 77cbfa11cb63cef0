//! Data parallelism over processes: all ranks against one, ours and the peer's.

use super::chart::{Bar, Panel};
use super::row::{Row, Side, best, grouped, over};
use super::table::{Cell, Column, Line, Table};

const COLUMNS: [Column; 7] = [
    ("contestant", "who"),
    ("ranks", "ranks"),
    ("samples_per_s", "samples/s"),
    ("ratio", ": one rank"),
    ("over_peer", ": peer"),
    ("spread", "spread"),
    ("sent_bytes", "sent a step, MiB"),
];

pub(super) fn tables(rows: &[&Row]) -> Vec<Table> {
    let table = |(title, group): (String, Vec<&Row>)| {
        let lines = group.iter().map(|row| line(row, &group)).collect();
        Table { title, columns: COLUMNS.into(), lines }
    };
    grouped(rows, work).into_iter().map(table).collect()
}

pub(super) fn panels(rows: &[&Row]) -> Vec<Panel> {
    let panel = |(title, group): (String, Vec<&Row>)| {
        let label = |row: &Row| format!("{}, {} ranks", row.contestant(), row.text("ranks"));
        let bars = group.iter().map(|row| Bar::of_speed(row, label(row))).collect();
        Panel { title, unit: "samples/s", bars, mark: "", is_zoomed: false }
    };
    grouped(rows, work).into_iter().map(panel).collect()
}

fn work(row: &Row) -> String {
    format!("{}, {} / {}", row.model(), row.text("batch"), row.text("micro_batch"))
}

fn line(row: &Row, group: &[&Row]) -> Line {
    let name = Cell::text(row.contestant());
    if let Some(error) = row.error() {
        return Line::Failed(vec![name], error.to_owned());
    }
    let is_ours = row.contestant().starts_with("brimful");
    let alone = |other: &&&Row| {
        other.text("ranks") == "1" && other.contestant().starts_with("brimful") == is_ours
    };
    let peers = group.iter().copied();
    let peers = peers.filter(|r| r.side() == Side::Peer && r.text("ranks") == row.text("ranks"));
    Line::Figures(vec![
        name,
        Cell::Count(row.number("ranks")),
        Cell::Number(row.speed()),
        Cell::Ratio(over(row.speed(), group.iter().find(alone).and_then(|row| row.speed())), 3),
        Cell::Ratio(over(row.speed(), best(peers)), 3),
        Cell::Percent(row.number("spread"), 1),
        Cell::Bytes(row.number("sent_bytes")),
    ])
}
