//! Automatic sizes, beside the best possible ones and beside Composer's.

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, best, grouped, over};
use super::table::Form::{Count, Number, Ratio, Text};
use super::table::{Table, TableColumn};

const FOUND: [TableColumn; 11] = [
    ("work", "model, limit, mini-batch", Text),
    ("largest", "largest", Count),
    ("feasible", "of what fits", Count),
    ("largest_failed", "failed", Count),
    ("extra_steps", "extra steps", Ratio(2)),
    ("micro_batch", "auto", Count),
    ("failed", "failed", Count),
    ("samples_per_s", "samples/s", Number),
    ("best", "best size", Count),
    ("of_best", "of best", Ratio(3)),
    ("of_fixed", "of fixed", Ratio(3)),
];

const BESIDE: [TableColumn; 6] = [
    ("contestant", "who", Text),
    ("micro_batch", "size", Count),
    ("failed", "failed", Count),
    ("first_step_s", "first step, s", Number),
    ("samples_per_s", "samples/s", Number),
    ("over_best_peer", ": best peer", Ratio(3)),
];

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let title = "What was found, and what there was to find";
    let found = by_work::tables(
        &searched(rows),
        |_| title.to_owned(),
        &FOUND,
        |row, _| {
            let of = |object: &str, key: &str| row.0[object][key].as_f64().into();
            vec![
                ("work", work(row).into()),
                ("largest", of("largest", "size")),
                ("feasible", of("largest", "feasible")),
                ("largest_failed", of("largest", "failed")),
                ("extra_steps", of("largest", "extra_steps")),
                ("best", of("best", "size")),
                ("of_best", of("best", "ratio")),
                ("of_fixed", row.number("ratio_to_fixed").into()),
            ]
        },
    );
    let beside = by_work::tables(&contests(rows), work, &BESIDE, |row, group| {
        let peer = best(group.iter().copied().filter(|row| row.side() == Side::Peer));
        vec![("over_best_peer", over(row.speed(), peer).into())]
    });
    found.into_iter().chain(beside).collect()
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let (title, unit) = ("Rate of the automatic size", "over the best size's");
    let mut panels = by_work::panels(
        &searched(rows),
        |_| title.to_owned(),
        unit,
        |row| {
            let ratio = row.0["best"]["ratio"].as_f64()?;
            Some(Bar { mark: Some(1.0), ..Bar::of(work(row), Side::Ours, ratio) })
        },
    );
    panels.iter_mut().for_each(|panel| panel.mark = "the best size");
    panels.extend(by_work::panels(&contests(rows), work, "samples/s", |row| {
        [Bar::of_speed(row, row.contestant())]
    }));
    panels
}

fn work(row: &ResultRow) -> String {
    let megabytes = row.number("limit_bytes").unwrap_or_default() / 1e6;
    format!("{}, {megabytes:.0} MB, {}", row.model(), row.text("batch"))
}

/// Returns the rows with a search over all sizes.
fn searched<'a>(rows: &[&'a ResultRow]) -> Vec<&'a ResultRow> {
    rows.iter().filter(|row| row.has("largest")).copied().collect()
}

/// Returns the rows of the works for which a peer has a row, too.
fn contests<'a>(rows: &[&'a ResultRow]) -> Vec<&'a ResultRow> {
    let mut groups = grouped(rows, work);
    groups.retain(|(_, group)| group.iter().any(|row| row.side() == Side::Peer));
    groups.into_iter().flat_map(|(_, group)| group).collect()
}
