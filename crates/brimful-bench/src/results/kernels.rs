//! Kernels of our own: what their first use costs, and a head's loss beside libtorch's.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, grouped};
use super::table::{Table, TableCell, TableColumn, TableLine};

const FIRST_USE: [TableColumn; 5] = [
    ("kernels", "in"),
    ("first_seconds", "first step, s"),
    ("third_seconds", "third step, s"),
    ("first_use_seconds", "first use, s"),
    ("libtorch_seconds", "in libtorch's before, s"),
];

const LOSS: [TableColumn; 8] = [
    ("contestant", "contestant"),
    ("ms", "ms"),
    ("time_ratio", "brimful's time : its"),
    ("peak_bytes", "peak MiB"),
    ("peak_ratio", "brimful's peak : its"),
    ("spread", "spread"),
    ("loss", "loss"),
    ("gradient_difference", "gradients apart"),
];

/// In the order in which they are measured: a run shows the last line of the last.
pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |columns: &[TableColumn], line: fn(&ResultRow) -> TableLine| {
        let columns = columns.to_vec();
        move |(title, group): (String, Vec<&ResultRow>)| {
            let lines = group.into_iter().map(line).collect();
            Table { title, columns: columns.clone(), lines }
        }
    };
    let (losses, first_uses) = parts(rows);
    let first_uses = grouped(&first_uses, images).into_iter();
    let losses = grouped(&losses, head).into_iter();
    first_uses
        .map(table(&FIRST_USE, first_use_line))
        .chain(losses.map(table(&LOSS, loss_line)))
        .collect()
}

fn first_use_line(row: &ResultRow) -> TableLine {
    TableLine::Figures(vec![
        TableCell::text(row.text("kernels")),
        TableCell::Number(row.number("first_seconds")),
        TableCell::Number(row.number("third_seconds")),
        TableCell::Number(row.number("first_use_seconds")),
        TableCell::Number(row.number("libtorch_seconds")),
    ])
}

fn loss_line(row: &ResultRow) -> TableLine {
    let apart = row.number("gradient_difference").map(|apart| format!("{apart:.0e}"));
    row.line(|| {
        vec![
            TableCell::Number(milliseconds(row)),
            TableCell::Ratio(row.number("time_ratio"), 3),
            TableCell::Bytes(row.number("peak_bytes")),
            TableCell::Ratio(row.number("peak_ratio"), 3),
            TableCell::Percent(row.number("spread"), 1),
            TableCell::Ratio(row.number("loss"), 4),
            TableCell::text(apart.unwrap_or_default()),
        ]
    })
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let panel = |unit, bars: fn(&ResultRow) -> Vec<Bar>| {
        move |(title, group): (String, Vec<&ResultRow>)| {
            let bars = group.into_iter().flat_map(bars).collect();
            BarPanel { title, unit, bars, mark: "", is_zoomed: false }
        }
    };
    let (losses, first_uses) = parts(rows);
    let first_uses = grouped(&first_uses, images).into_iter();
    let losses = grouped(&losses, head).into_iter();
    first_uses
        .map(panel("seconds a step", first_use_bars))
        .chain(losses.map(panel("ms, forward and backward", loss_bars)))
        .collect()
}

fn first_use_bars(row: &ResultRow) -> Vec<Bar> {
    let bar = |label: &str, side, key| {
        row.number(key).map(|seconds| Bar::of(label.to_owned(), side, seconds))
    };
    let bars = [
        bar("first step", Side::Ours, "first_seconds"),
        bar("third step", Side::Ours, "third_seconds"),
        bar("in libtorch's kernels", Side::Reference, "libtorch_seconds"),
    ];
    bars.into_iter().flatten().collect()
}

fn loss_bars(row: &ResultRow) -> Vec<Bar> {
    let bar = |time| Bar::of(row.contestant(), row.side(), time);
    milliseconds(row).map(bar).into_iter().collect()
}

/// The rows of losses, and those of first uses.
fn parts<'a>(rows: &[&'a ResultRow]) -> (Vec<&'a ResultRow>, Vec<&'a ResultRow>) {
    rows.iter().partition(|row| row.text("part") == "loss")
}

fn milliseconds(row: &ResultRow) -> Option<f64> {
    row.number("seconds").map(|seconds| 1e3 * seconds)
}

fn images(row: &ResultRow) -> String {
    format!("{} on {}, {} images", row.model(), row.text("device"), row.text("batch"))
}

fn head(row: &ResultRow) -> String {
    format!(
        "A head's loss, {} on {}: {} places, {} words, width {}",
        row.text("dtype"),
        row.text("device"),
        row.text("places"),
        row.text("words"),
        row.text("width")
    )
}
