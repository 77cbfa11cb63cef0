//! Backwards in two halves, ours and the peers', each beside the whole backward of the same graph.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, grouped, over};
use super::table::{Table, TableCell, TableColumn, TableLine};

const COLUMNS: [TableColumn; 10] = [
    ("contestant", "who"),
    ("forward_ms", "forward, ms"),
    ("whole_ms", "whole, ms"),
    ("engine_ms", "by libtorch's engine, ms"),
    ("input_ms", "input half, ms"),
    ("weight_ms", "weight half, ms"),
    ("ratio", "halves : whole"),
    ("over_peer", "peer's halves : ours"),
    ("spread", "spread"),
    ("gradient_difference", "gradients apart"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |(title, of_work): (String, Vec<&ResultRow>)| {
        let peer = of_work.iter().find(|row| row.side() == Side::Peer);
        let peer = peer.and_then(|row| row.number("halves_seconds"));
        let line = |row: &&ResultRow| line(row, peer);
        Table { title, columns: COLUMNS.into(), lines: of_work.iter().map(line).collect() }
    };
    grouped(rows, work).into_iter().map(table).collect()
}

fn line(row: &ResultRow, peer: Option<f64>) -> TableLine {
    let milliseconds = |key| TableCell::Number(row.number(key).map(|seconds| 1e3 * seconds));
    let ours = row.number("halves_seconds").filter(|_| row.side() == Side::Ours);
    let apart = row.number("gradient_difference").map(|apart| format!("{apart:.0e}"));
    row.line(|| {
        vec![
            milliseconds("forward_seconds"),
            milliseconds("whole_seconds"),
            milliseconds("engine_seconds"),
            milliseconds("input_seconds"),
            milliseconds("weight_seconds"),
            TableCell::Ratio(row.number("ratio"), 3),
            TableCell::Ratio(over(peer, ours), 3),
            TableCell::Percent(row.number("spread"), 1),
            TableCell::text(apart.unwrap_or_default()),
        ]
    })
}

/// Each contestant's whole backward, and under it both halves.
pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let panel = |(title, of_work): (String, Vec<&ResultRow>)| {
        let bars = of_work.iter().flat_map(|row| {
            let bar = |what: &str, key: &str| {
                let label = format!("{}, {what}", row.contestant());
                row.number(key).map(|seconds| Bar::of(label, row.side(), 1e3 * seconds))
            };
            [bar("whole", "whole_seconds"), bar("in halves", "halves_seconds")]
        });
        let bars = bars.flatten().collect();
        BarPanel { title, unit: "ms a backward", bars, mark: "", is_zoomed: false }
    };
    grouped(rows, work).into_iter().map(panel).collect()
}

fn work(row: &ResultRow) -> String {
    format!("{} on {}, micro-batch {}", row.model(), row.text("device"), row.text("micro_batch"))
}
