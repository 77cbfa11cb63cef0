//! The comparison of schedules as a text table.

use brimful::Bytes;

use super::answers::PlanAnswer;
use super::stage_table;

/// A line for each answer under a line of headings.
pub(super) fn table(shown: &[PlanAnswer], in_seconds: bool) -> String {
    let mut rows = vec![headings(shown)];
    rows.extend(shown.iter().map(|answer| cells(answer, shown, in_seconds)));
    let widths: Vec<_> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    rows.iter().map(|row| line(row, &widths)).collect()
}

/// Columns that would say the same in every row, or nothing, are left out.
fn headings(shown: &[PlanAnswer]) -> Vec<String> {
    let mut headings = vec!["schedule", "m", "recompute", "makespan", "bubble"];
    headings.push(if has_bytes(shown) { "peak" } else { "holds" });
    if has_homes(shown) {
        headings.push("on the host");
    }
    if has_balance(shown) {
        headings.push("balance");
    }
    if has_misfits(shown) {
        headings.push("fits");
    }
    headings.into_iter().map(str::to_owned).collect()
}

fn cells(answer: &PlanAnswer, shown: &[PlanAnswer], in_seconds: bool) -> Vec<String> {
    let line = &answer.line;
    let mut cells = vec![
        line.schedule.clone(),
        line.micro_batches.to_string(),
        line.recompute.map_or("-".to_owned(), |mode| stage_table::recomputed(&line.stages, mode)),
        if in_seconds { seconds(line.makespan) } else { number(line.makespan) },
        format!("{:.1} %", 100.0 * line.bubble),
    ];
    let peak = line.peak_bytes.iter().copied().max().unwrap_or(0);
    cells.push(if has_bytes(shown) {
        Bytes(peak).to_string()
    } else {
        format!("{} A", number(answer.held()))
    });
    if has_homes(shown) {
        cells.push(stage_table::at_home(&line.stages, line.host_bytes));
    }
    if has_balance(shown) {
        cells.push(line.balance.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
    }
    if has_misfits(shown) {
        cells.push(line.reason.as_ref().map_or("yes".to_owned(), |reason| format!("no: {reason}")));
    }
    cells
}

fn has_bytes(shown: &[PlanAnswer]) -> bool {
    shown.iter().any(|answer| answer.line.peak_bytes.iter().any(|bytes| *bytes > 0))
}

fn has_homes(shown: &[PlanAnswer]) -> bool {
    shown.iter().any(|answer| answer.line.host_bytes > 0)
}

fn has_balance(shown: &[PlanAnswer]) -> bool {
    shown.iter().any(|answer| answer.line.balance.iter().any(|layers| *layers > 1))
}

fn has_misfits(shown: &[PlanAnswer]) -> bool {
    shown.iter().any(|answer| !answer.line.fits)
}

/// Numbers to the right, words to the left.
fn line(row: &[String], widths: &[usize]) -> String {
    let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
        1 | 3 | 4 | 5 => format!("{cell:>width$}"),
        _ => format!("{cell:<width$}"),
    });
    format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
}

/// At most four digits behind the point, and none that says nothing.
fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Three digits and the unit in which they are read best.
fn seconds(value: f64) -> String {
    let (scaled, unit) = match value {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "µs"),
    };
    let decimals = if scaled < 10.0 { 2 } else { usize::from(scaled < 100.0) };
    format!("{scaled:.decimals$} {unit}")
}
