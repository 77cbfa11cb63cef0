//! Ranks: data parallelism against one of them, pipelines against one process; and against the peers.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, best, grouped, over};
use super::table::{Table, TableCell, TableColumn, TableLine};

/// What tells the two benchmarks apart.
struct View {
    /// What there are several of.
    of: &'static str,
    /// What ours, and the peer's, are compared with.
    base: &'static str,
    /// Whether the second row is what the first is compared with.
    is_base: fn(&ResultRow, &ResultRow) -> bool,
}

const DATA: View = View { of: "ranks", base: ": one rank", is_base: is_one_rank };
const PIPELINE: View = View { of: "stages", base: ": one process", is_base: is_one_process };

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    DATA.tables(rows)
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    DATA.panels(rows)
}

pub(super) fn pipeline_tables(rows: &[&ResultRow]) -> Vec<Table> {
    PIPELINE.tables(rows)
}

pub(super) fn pipeline_panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    PIPELINE.panels(rows)
}

fn is_one_rank(row: &ResultRow, other: &ResultRow) -> bool {
    let is_ours = |row: &ResultRow| row.contestant().starts_with("brimful");
    other.text("ranks") == "1" && is_ours(other) == is_ours(row)
}

fn is_one_process(row: &ResultRow, other: &ResultRow) -> bool {
    other.contestant() == "brimful" && other.text("stages") == row.text("stages")
}

impl View {
    fn tables(&self, rows: &[&ResultRow]) -> Vec<Table> {
        let table = |(title, group): (String, Vec<&ResultRow>)| {
            let lines = group.iter().map(|row| self.line(row, &group)).collect();
            Table { title, columns: self.columns().into(), lines }
        };
        grouped(rows, work).into_iter().map(table).collect()
    }

    fn panels(&self, rows: &[&ResultRow]) -> Vec<BarPanel> {
        let panel = |(title, group): (String, Vec<&ResultRow>)| {
            let label = |row: &ResultRow| {
                format!("{}, {} {}", row.contestant(), row.text(self.of), self.of)
            };
            let bars = group.iter().map(|row| Bar::of_speed(row, label(row))).collect();
            BarPanel { title, unit: "samples/s", bars, mark: "", is_zoomed: false }
        };
        grouped(rows, work).into_iter().map(panel).collect()
    }

    fn columns(&self) -> [TableColumn; 7] {
        [
            ("contestant", "who"),
            (self.of, self.of),
            ("samples_per_s", "samples/s"),
            ("ratio", self.base),
            ("over_peer", ": peer"),
            ("spread", "spread"),
            ("sent_bytes", "sent a step, MiB"),
        ]
    }

    fn line(&self, row: &ResultRow, group: &[&ResultRow]) -> TableLine {
        let base = group.iter().find(|other| (self.is_base)(row, other));
        let peers = group
            .iter()
            .copied()
            .filter(|other| other.side() == Side::Peer && other.text(self.of) == row.text(self.of));
        row.line(|| {
            vec![
                TableCell::Count(row.number(self.of)),
                TableCell::Number(row.speed()),
                TableCell::Ratio(over(row.speed(), base.and_then(|row| row.speed())), 3),
                TableCell::Ratio(over(row.speed(), best(peers)), 3),
                TableCell::Percent(row.number("spread"), 1),
                TableCell::Bytes(row.number("sent_bytes")),
            ]
        })
    }
}

fn work(row: &ResultRow) -> String {
    let (model, batch, device) = (row.model(), row.text("batch"), row.text("device"));
    format!("{model}, {batch} / {} on {device}", row.text("micro_batch"))
}
