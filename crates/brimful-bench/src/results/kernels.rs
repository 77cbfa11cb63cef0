//! Custom kernels: the cost of their first use, and a head's loss beside libtorch's.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side};
use super::table::Form::{Bytes, Number, Percent, Ratio, Text};
use super::table::{Table, TableColumn};

const FIRST_USE: [TableColumn; 5] = [
    ("kernels", "in", Text),
    ("first_seconds", "first step, s", Number),
    ("third_seconds", "third step, s", Number),
    ("first_use_seconds", "first use, s", Number),
    ("libtorch_seconds", "in libtorch's before, s", Number),
];

const LOSS: [TableColumn; 8] = [
    ("contestant", "contestant", Text),
    ("ms", "ms", Number),
    ("time_ratio", "brimful's time : its", Ratio(3)),
    ("peak_bytes", "peak MiB", Bytes),
    ("peak_ratio", "brimful's peak : its", Ratio(3)),
    ("spread", "spread", Percent(1)),
    ("loss", "loss", Ratio(4)),
    ("gradient_difference", "gradients apart", Text),
];

/// Makes the tables in the order of measurement, because a run prints the last line of the last table.
pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let (losses, first_uses) = parts(rows);
    let mut tables = by_work::tables(&first_uses, images, &FIRST_USE, |_, _| Vec::new());
    tables.extend(by_work::tables(&losses, head, &LOSS, |row, _| {
        vec![
            ("ms", row.milliseconds("seconds").into()),
            ("gradient_difference", row.gradients_apart().into()),
        ]
    }));
    tables
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let (losses, first_uses) = parts(rows);
    let mut panels = by_work::panels(&first_uses, images, "seconds a step", |row| {
        let bar =
            |label: &str, side, key| row.number(key).map(|seconds| Bar::of(label, side, seconds));
        let bars = [
            bar("first step", Side::Ours, "first_seconds"),
            bar("third step", Side::Ours, "third_seconds"),
            bar("in libtorch's kernels", Side::Reference, "libtorch_seconds"),
        ];
        bars.into_iter().flatten()
    });
    panels.extend(by_work::panels(&losses, head, "ms, forward and backward", |row| {
        let bar = |time| Bar::of(row.contestant(), row.side(), time);
        row.milliseconds("seconds").map(bar)
    }));
    panels
}

/// Separates the rows of losses from those of first uses.
fn parts<'a>(rows: &[&'a ResultRow]) -> (Vec<&'a ResultRow>, Vec<&'a ResultRow>) {
    rows.iter().partition(|row| row.text("part") == "loss")
}

fn images(row: &ResultRow) -> String {
    format!("{} on {}, {} images", row.model(), row.text("device"), row.text("batch"))
}

fn head(row: &ResultRow) -> String {
    let [dtype, device] = row.texts(["dtype", "device"]);
    let [places, words, width] = row.texts(["places", "words", "width"]);
    format!("A head's loss, {dtype} on {device}: {places} places, {words} words, width {width}")
}
