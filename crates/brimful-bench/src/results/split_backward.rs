//! Split backwards, ours and the peers', each beside the whole backward of the same graph.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, over};
use super::table::Form::{Number, Percent, Ratio, Text};
use super::table::{Table, TableColumn};

const COLUMNS: [TableColumn; 10] = [
    ("contestant", "who", Text),
    ("forward_ms", "forward, ms", Number),
    ("whole_ms", "whole, ms", Number),
    ("engine_ms", "by libtorch's engine, ms", Number),
    ("input_ms", "dX, ms", Number),
    ("weight_ms", "dW, ms", Number),
    ("ratio", "split : whole", Ratio(3)),
    ("over_peer", "peer's split : ours", Ratio(3)),
    ("spread", "spread", Percent(1)),
    ("gradient_difference", "gradients apart", Text),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    by_work::tables(rows, work, &COLUMNS, |row, group| {
        let peer = group.iter().find(|row| row.side() == Side::Peer);
        let peer = peer.and_then(|row| row.number("split_seconds"));
        let ours = row.number("split_seconds").filter(|_| row.side() == Side::Ours);
        vec![
            ("forward_ms", row.milliseconds("forward_seconds").into()),
            ("whole_ms", row.milliseconds("whole_seconds").into()),
            ("engine_ms", row.milliseconds("engine_seconds").into()),
            ("input_ms", row.milliseconds("input_seconds").into()),
            ("weight_ms", row.milliseconds("weight_seconds").into()),
            ("over_peer", over(peer, ours).into()),
            ("gradient_difference", row.gradients_apart().into()),
        ]
    })
}

/// Makes a panel of each contestant's whole backward, and below it the split one.
pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    by_work::panels(rows, work, "ms a backward", |row| {
        let bar = |what: &str, key: &str| {
            let label = format!("{}, {what}", row.contestant());
            row.milliseconds(key).map(|time| Bar::of(label, row.side(), time))
        };
        let bars = [bar("whole", "whole_seconds"), bar("split", "split_seconds")];
        bars.into_iter().flatten()
    })
}

fn work(row: &ResultRow) -> String {
    format!("{} on {}, micro-batch {}", row.model(), row.text("device"), row.text("micro_batch"))
}
