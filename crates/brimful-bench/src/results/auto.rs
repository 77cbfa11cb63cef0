//! Automatic sizes: beside what there was to find, and beside Composer's.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, best, grouped, over};
use super::table::{Table, TableCell, TableColumn, TableLine};

const FOUND: [TableColumn; 11] = [
    ("work", "model, limit, mini-batch"),
    ("largest", "largest"),
    ("feasible", "of what fits"),
    ("largest_failed", "failed"),
    ("extra_steps", "extra steps"),
    ("micro_batch", "auto"),
    ("failed", "failed"),
    ("samples_per_s", "samples/s"),
    ("best", "best size"),
    ("of_best", "of best"),
    ("of_fixed", "of fixed"),
];

const BESIDE: [TableColumn; 6] = [
    ("contestant", "who"),
    ("micro_batch", "size"),
    ("failed", "failed"),
    ("first_step_s", "first step, s"),
    ("samples_per_s", "samples/s"),
    ("over_best_peer", ": best peer"),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let searched: Vec<&ResultRow> = rows.iter().filter(|row| row.has("largest")).copied().collect();
    let mut tables = Vec::new();
    if !searched.is_empty() {
        let lines = searched.iter().map(|row| found(row)).collect();
        let title = "What was found, and what there was to find".to_owned();
        tables.push(Table { title, columns: FOUND.into(), lines });
    }
    tables.extend(contests(rows).iter().map(|(title, group)| beside(title, group)));
    tables
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let searched: Vec<&ResultRow> = rows.iter().filter(|row| row.has("largest")).copied().collect();
    let mut panels = Vec::new();
    if !searched.is_empty() {
        let ratio = |row: &&ResultRow| {
            let ratio = row.0["best"]["ratio"].as_f64()?;
            Some(Bar { mark: Some(1.0), ..Bar::of(work(row), Side::Ours, ratio) })
        };
        let bars = searched.iter().filter_map(ratio).collect();
        let title = "Rate of the automatic size".to_owned();
        panels.push(BarPanel {
            title,
            unit: "over the best size's",
            bars,
            mark: "the best size",
            is_zoomed: false,
        });
    }
    panels.extend(contests(rows).into_iter().map(|(title, group)| BarPanel {
        title,
        unit: "samples/s",
        bars: group.iter().map(|row| Bar::of_speed(row, row.contestant())).collect(),
        mark: "",
        is_zoomed: false,
    }));
    panels
}

fn work(row: &ResultRow) -> String {
    let megabytes = row.number("limit_bytes").unwrap_or_default() / 1e6;
    format!("{}, {megabytes:.0} MB, {}", row.model(), row.text("batch"))
}

/// The works that a peer has a row of, too.
fn contests<'a>(rows: &[&'a ResultRow]) -> Vec<(String, Vec<&'a ResultRow>)> {
    let mut groups = grouped(rows, work);
    groups.retain(|(_, group)| group.iter().any(|row| row.side() == Side::Peer));
    groups
}

fn found(row: &ResultRow) -> TableLine {
    let of = |object: &str, key: &str| row.0[object][key].as_f64();
    TableLine::Figures(vec![
        TableCell::text(work(row)),
        TableCell::Count(of("largest", "size")),
        TableCell::Count(of("largest", "feasible")),
        TableCell::Count(of("largest", "failed")),
        TableCell::Ratio(of("largest", "extra_steps"), 2),
        TableCell::Count(row.number("micro_batch")),
        TableCell::Count(row.number("failed")),
        TableCell::Number(row.speed()),
        TableCell::Count(of("best", "size")),
        TableCell::Ratio(of("best", "ratio"), 3),
        TableCell::Ratio(row.number("ratio_to_fixed"), 3),
    ])
}

fn beside(title: &str, group: &[&ResultRow]) -> Table {
    let peer = best(group.iter().copied().filter(|row| row.side() == Side::Peer));
    let line = |row: &&ResultRow| {
        row.line(|| {
            vec![
                TableCell::Count(row.number("micro_batch")),
                TableCell::Count(row.number("failed")),
                TableCell::Number(row.number("first_step_s")),
                TableCell::Number(row.speed()),
                TableCell::Ratio(over(row.speed(), peer), 3),
            ]
        })
    };
    let lines = group.iter().map(line).collect();
    Table { title: title.to_owned(), columns: BESIDE.into(), lines }
}
