//! Trainings that should differ only by chance: accuracies, and whether they do.

use serde::Serialize;
use serde_json::json;

use super::by_work;
use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, Side, grouped};
use super::table::Form::{Count, Percent, Text};
use super::table::{Table, TableColumn, TableLine};

/// Contestant that the others are compared with.
const FULL: &str = "full batch";

const COLUMNS: [TableColumn; 8] = [
    ("contestant", "contestant", Text),
    ("accuracies", "test accuracies by seed", Text),
    ("mean_accuracy", "mean", Percent(2)),
    ("deviation", "deviation", Percent(2)),
    ("difference", "difference", Percent(2)),
    ("noise", "noise", Percent(2)),
    ("within_noise", "within it", Text),
    ("micro_batch", "micro-batch", Count),
];

/// All accuracies of a contestant beside those of the full batch.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    pub(crate) mean_accuracy: f64,
    pub(crate) deviation: f64,
    /// Difference of the mean from that of the full batch.
    pub(crate) difference: f64,
    /// Twice the standard error of that difference.
    pub(crate) noise: f64,
    pub(crate) within_noise: bool,
}

impl Comparison {
    /// Compares; returns none if one of them has a single run and so no deviation.
    pub(crate) fn new(reached: &[f64], full: &[f64]) -> Option<Self> {
        let ((mean, deviation), (full_mean, full_deviation)) = (spread(reached)?, spread(full)?);
        let share = |deviation: f64, runs: &[f64]| deviation.powi(2) / runs.len() as f64;
        let noise = 2.0 * (share(deviation, reached) + share(full_deviation, full)).sqrt();
        let difference = mean - full_mean;
        let within_noise = difference.abs() <= noise;
        Some(Self { mean_accuracy: mean, deviation, difference, noise, within_noise })
    }
}

pub(super) fn tables(rows: &[&ResultRow]) -> Vec<Table> {
    let table = |(title, group): (String, Vec<&ResultRow>)| {
        let full = accuracies(&group, FULL);
        let contestants = grouped(&group, ResultRow::contestant);
        let lines = contestants.iter().map(|(name, runs)| line(name, runs, &full)).collect();
        Table { title, columns: COLUMNS.into(), lines }
    };
    grouped(&runs(rows), work).into_iter().map(table).collect()
}

pub(super) fn panels(rows: &[&ResultRow]) -> Vec<BarPanel> {
    let panel = |(title, group): (String, Vec<&ResultRow>)| {
        let bar = |(name, runs): (String, Vec<&ResultRow>)| {
            let points: Vec<f64> =
                accuracies(&runs, &name).iter().map(|accuracy| 100.0 * accuracy).collect();
            let mean = points.iter().sum::<f64>() / points.len() as f64;
            let side = if name == FULL { Side::Reference } else { Side::Ours };
            Bar { points, ..Bar::of(name, side, mean) }
        };
        let bars = grouped(&group, ResultRow::contestant).into_iter().map(bar).collect();
        let unit = "test accuracy in %, a seed each, and their mean";
        BarPanel { title, unit, bars, mark: "", is_zoomed: true }
    };
    grouped(&runs(rows), work).into_iter().map(panel).collect()
}

/// Returns the single trainings: summaries are recomputed over all files.
fn runs<'a>(rows: &[&'a ResultRow]) -> Vec<&'a ResultRow> {
    rows.iter().filter(|row| row.has("test_accuracy")).copied().collect()
}

fn work(row: &ResultRow) -> String {
    let [model, data, batch, epochs] = row.texts(["model", "data", "batch", "epochs"]);
    format!("{model} on {data}, mini-batch {batch}, after {epochs} epochs, {}", row.text("device"))
}

fn accuracies(rows: &[&ResultRow], contestant: &str) -> Vec<f64> {
    let rows = rows.iter().filter(|row| row.contestant() == contestant);
    rows.filter_map(|row| row.number("test_accuracy")).collect()
}

fn line(name: &str, runs: &[&ResultRow], full: &[f64]) -> TableLine {
    let reached = accuracies(runs, name);
    let listed: Vec<String> = reached.iter().map(|a| format!("{:.2} %", 100.0 * a)).collect();
    let comparison = Comparison::new(&reached, full);
    let within = comparison.as_ref().map_or("–", |c| if c.within_noise { "yes" } else { "no" });
    let derived = vec![
        ("contestant", name.into()),
        ("accuracies", listed.join(", ").into()),
        ("within_noise", within.into()),
        ("micro_batch", runs.last().and_then(|row| row.number("micro_batch")).into()),
    ];
    let cells = by_work::cells(&ResultRow(json!(comparison)), &COLUMNS, derived);
    TableLine { cells, error: None }
}

/// Returns the mean of some numbers, and their sample standard deviation.
fn spread(numbers: &[f64]) -> Option<(f64, f64)> {
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
    (numbers.len() > 1).then(|| (mean, (squares / (count - 1.0)).sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_twice_the_standard_error_of_the_difference() {
        let comparison = Comparison::new(&[0.90, 0.92], &[0.91, 0.93]).expect("two runs each");
        assert!((comparison.difference + 0.01).abs() < 1e-12);
        // Both deviations are √2/100, over two runs each.
        assert!((comparison.noise - 2.0 * (2.0_f64 * 1e-4).sqrt()).abs() < 1e-12);
        assert!(comparison.within_noise);
        assert!(Comparison::new(&[0.9], &[0.9, 0.8]).is_none());
    }
}
