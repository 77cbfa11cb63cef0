//! Ranks: data parallelism against one rank, pipelines against one process; and against the peers.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, best, over};
use super::table::Form::{Bytes, Count, Number, Percent, Ratio, Text};
use super::table::{Table, TableColumn};

/// Settings in which the two benchmarks differ.
pub(super) struct RanksView {
    /// Unit of parallelism.
    of: &'static str,
    /// Heading of the column of ratios to the baseline.
    base: &'static str,
    /// Returns whether the second row is the baseline of the first.
    is_base: fn(&ResultRow, &ResultRow) -> bool,
}

pub(super) const DATA: RanksView =
    RanksView { of: "ranks", base: ": one rank", is_base: is_one_rank };
pub(super) const PIPELINE: RanksView =
    RanksView { of: "stages", base: ": one process", is_base: is_one_process };

fn is_one_rank(row: &ResultRow, other: &ResultRow) -> bool {
    let is_ours = |row: &ResultRow| row.contestant().starts_with("brimful");
    other.text("ranks") == "1" && is_ours(other) == is_ours(row)
}

fn is_one_process(row: &ResultRow, other: &ResultRow) -> bool {
    other.contestant() == "brimful" && other.text("stages") == row.text("stages")
}

impl RanksView {
    pub(super) fn tables(&self, rows: &[&ResultRow]) -> Vec<Table> {
        by_work::tables(rows, work, &self.columns(), |row, group| {
            let base = group.iter().find(|other| (self.is_base)(row, other));
            let is_like = |other: &&ResultRow| other.text(self.of) == row.text(self.of);
            let peers = group.iter().copied().filter(|other| other.side() == Side::Peer);
            vec![
                ("ratio", over(row.speed(), base.and_then(|row| row.speed())).into()),
                ("over_peer", over(row.speed(), best(peers.filter(is_like))).into()),
            ]
        })
    }

    pub(super) fn panels(&self, rows: &[&ResultRow]) -> Vec<BarPanel> {
        by_work::panels(rows, work, "samples/s", |row| {
            let label = format!("{}, {} {}", row.contestant(), row.text(self.of), self.of);
            [Bar::of_speed(row, label)]
        })
    }

    fn columns(&self) -> [TableColumn; 7] {
        [
            ("contestant", "who", Text),
            (self.of, self.of, Count),
            ("samples_per_s", "samples/s", Number),
            ("ratio", self.base, Ratio(3)),
            ("over_peer", ": peer", Ratio(3)),
            ("spread", "spread", Percent(1)),
            ("sent_bytes", "sent a step, MiB", Bytes),
        ]
    }
}

fn work(row: &ResultRow) -> String {
    let (model, batch, device) = (row.model(), row.text("batch"), row.text("device"));
    format!("{model}, {batch} / {} on {device}", row.text("micro_batch"))
}
