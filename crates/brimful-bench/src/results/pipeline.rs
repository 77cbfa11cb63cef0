//! Pipelines: each beside its limits, beside the peers with the same schedule, and the best of ours.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, best, grouped, over};
use super::table::Form::{Bytes, Number, Percent, Ratio, Text};
use super::table::{Table, TableColumn, TableLine};

/// Name of the peers' model on one thread.
const PEERS_ALONE: &str = "PyTorch, one thread";

const COLUMNS: [TableColumn; 14] = [
    ("pipeline", "stages, schedule, recompute", Text),
    ("contestant", "who", Text),
    ("samples_per_s", "samples/s", Number),
    ("ratio", "over one thread", Ratio(3)),
    ("limit", "bubble's limit", Ratio(3)),
    ("simulated", "balance's limit", Ratio(3)),
    ("machine", "machine", Ratio(3)),
    ("of_limit", "of bubble's", Ratio(3)),
    ("of_balance", "of balance's", Ratio(3)),
    ("over_peer", ": peer", Ratio(3)),
    ("published_ratio", "published", Ratio(3)),
    ("bubble", "bubble", Percent(1)),
    ("peak_bytes", "peak MiB", Bytes),
    ("spread", "spread", Percent(1)),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |(title, group): (String, Vec<&ResultRow>)| {
        let mut lines = references(&group);
        for stages in stage_counts(&group) {
            lines.extend(contest(&group, stages));
        }
        Table { title, columns: COLUMNS.into(), lines }
    };
    grouped(rows, work).into_iter().map(table).collect()
}

/// Makes a panel for each work and number of stages, with the limits of bubble and machine as marks.
pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let panel = |title: &str, group: &[&ResultRow], stages: f64| {
        let bar = |row: &ResultRow| {
            let alone = over(row.speed(), row.number("ratio"));
            let mark = alone.and_then(|alone| Some(alone * over_limits(row, "limit")?));
            Bar { mark, ..Bar::of_speed(row, format!("{}, {}", row.contestant(), schedule(row))) }
        };
        BarPanel {
            title: format!("{title}, {stages} stages"),
            unit: "samples/s",
            bars: of_stages(group, stages).map(bar).collect(),
            mark: "bubble's limit × machine",
            is_zoomed: false,
        }
    };
    let works = grouped(rows, work);
    let panels = works.iter().flat_map(|(title, group)| {
        let counts = stage_counts(group).into_iter();
        counts.map(|stages| panel(title, group, stages))
    });
    panels.collect()
}

fn work(row: &ResultRow) -> String {
    let [device, count, size] = row.texts(["device", "micro_batches", "micro_batch"]);
    format!("{} on {device}, {count} micro-batches of {size}", row.model())
}

fn schedule(row: &ResultRow) -> String {
    match row.text("recompute").as_str() {
        "never" => row.text("schedule"),
        recompute => format!("{}, {recompute}", row.text("schedule")),
    }
}

fn stage_counts(rows: &[&ResultRow]) -> Vec<f64> {
    let rows = rows.iter().filter(|row| row.side() != Side::Reference);
    let mut counts: Vec<f64> = rows.filter_map(|row| row.number("stages")).collect();
    counts.sort_by(f64::total_cmp);
    counts.dedup();
    counts
}

fn of_stages<'a>(rows: &[&'a ResultRow], stages: f64) -> impl Iterator<Item = &'a ResultRow> {
    let rows = rows.iter().copied().filter(|row| row.side() != Side::Reference);
    rows.filter(move |row| row.number("stages") == Some(stages))
}

/// Returns a line for each library's model on one thread: the median over the runs beside each number of stages.
fn references(group: &[&ResultRow]) -> Vec<TableLine> {
    let alone: Vec<&ResultRow> =
        group.iter().copied().filter(|row| row.side() == Side::Reference).collect();
    let line = |(name, rows): (String, Vec<&ResultRow>)| {
        let mut speeds: Vec<f64> = rows.iter().filter_map(|row| row.speed()).collect();
        speeds.sort_by(f64::total_cmp);
        let median = speeds.get(speeds.len() / 2).copied();
        let cells = vec!["–".into(), name.into(), median.into()];
        TableLine { cells, error: None }
    };
    grouped(&alone, ResultRow::contestant).into_iter().map(line).collect()
}

/// Returns the lines of one number of stages, the best of ours last.
fn contest(group: &[&ResultRow], stages: f64) -> Vec<TableLine> {
    let rows: Vec<&ResultRow> = of_stages(group, stages).collect();
    let peers = || rows.iter().copied().filter(|row| row.side() == Side::Peer);
    let same = |row: &ResultRow| {
        let like = |peer: &&ResultRow| {
            ["schedule", "recompute"].iter().all(|key| peer.text(key) == row.text(key))
        };
        best(peers().filter(like))
    };
    let line = |row: &&ResultRow| {
        let name = row.texts(["stages", "schedule", "recompute"]).join(", ");
        if let Some(error) = row.error() {
            let cells = vec![name.into(), row.contestant().into()];
            return TableLine { cells, error: Some(error.to_owned()) };
        }
        figures(row, name, group, same(row).filter(|_| row.side() == Side::Ours))
    };
    let mut lines: Vec<TableLine> = rows.iter().map(line).collect();
    let ours = rows.iter().filter(|row| row.side() == Side::Ours);
    let speed = |row: &ResultRow| row.speed().unwrap_or_default();
    let winner = ours.max_by(|a, b| f64::total_cmp(&speed(a), &speed(b)));
    if let (Some(winner), Some(peer)) = (winner, best(peers())) {
        let name = format!("{stages}, best of each: {}", schedule(winner));
        lines.push(figures(winner, name, group, Some(peer)));
    }
    lines
}

/// Returns the line of a row. `group` has all rows of the same work, `peer` is the speed of the compared peer.
fn figures(row: &ResultRow, name: String, group: &[&ResultRow], peer: Option<f64>) -> TableLine {
    // Speed over that of one thread. Our rows have this ratio; for a peer it is computed from its own model.
    let alone = || group.iter().find(|row| row.contestant() == PEERS_ALONE);
    let ratio = row.number("ratio").or_else(|| over(row.speed(), alone()?.speed()));
    let derived = vec![
        ("pipeline", name.into()),
        ("ratio", ratio.into()),
        ("of_limit", over(ratio, over_limits(row, "limit")).into()),
        ("of_balance", over(ratio, over_limits(row, "simulated")).into()),
        ("over_peer", over(row.speed(), peer).into()),
    ];
    TableLine { cells: by_work::cells(row, &COLUMNS, derived), error: None }
}

/// Returns a limit of the ratio, times the machine's capacity.
fn over_limits(row: &ResultRow, limit: &str) -> Option<f64> {
    Some(row.number(limit)? * row.number("machine")?)
}
