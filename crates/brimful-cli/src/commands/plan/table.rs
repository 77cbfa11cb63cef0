//! Comparison of schedules as a text table, and the stages of a plan as lines of text and of JSON.

use brimful::Bytes;
use brimful::balance::Profile;
use brimful::plan::PlanRow;
use brimful::schedule::{Location, Recompute};
use brimful_plan::plan::PlannedStage;
use serde::Serialize;

use super::answers::{PlanAnswer, PlanLine};

/// A column: whether it is shown, its heading, and its cell for a plan.
type Column<'a> = (bool, &'static str, &'a dyn Fn(&PlanAnswer) -> String);

/// Formats a line of headings and a line for each plan.
pub(super) fn compare(shown: &[PlanAnswer], in_seconds: bool) -> String {
    let any = |is: fn(&PlanLine) -> bool| shown.iter().any(|answer| is(&answer.line));
    let has_bytes = any(|line| line.peak_bytes.iter().any(|bytes| *bytes > 0));
    let time = if in_seconds { seconds } else { number };
    // Leaves out columns that would say nothing, such as `fits` if every plan fits.
    let columns: [Column<'_>; 10] = [
        (true, "schedule", &|answer| answer.line.schedule.clone()),
        (true, "m", &|answer| answer.line.micro_batches.to_string()),
        (true, "recompute", &|answer| recomputed(&answer.line)),
        (true, "makespan", &|answer| time(answer.line.makespan)),
        (true, "bubble", &|answer| format!("{:.1} %", 100.0 * answer.line.bubble)),
        (has_bytes, "peak", &|answer| peak(&answer.line).to_string()),
        (!has_bytes, "holds", &|answer| format!("{} A", number(answer.held()))),
        (any(|line| line.host_bytes > 0), "on the host", &|answer| on_host(&answer.line)),
        (any(is_balanced), "balance", &|answer| balance(&answer.line)),
        (any(|line| !line.fits), "fits", &|answer| fits(&answer.line)),
    ];
    let columns = || columns.iter().filter(|(is_shown, ..)| *is_shown);
    let headings = columns().map(|(_, heading, _)| (*heading).to_owned()).collect();
    let cells = |answer| columns().map(|(.., cell)| cell(answer)).collect();
    let rows: Vec<Vec<String>> = [headings].into_iter().chain(shown.iter().map(cells)).collect();
    let widths: Vec<_> = (0..columns().count())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    rows.iter().map(|row| line(row, &widths)).collect()
}

fn peak(line: &PlanLine) -> Bytes {
    Bytes(line.peak_bytes.iter().copied().max().unwrap_or(0))
}

/// Returns whether any stage has more than one layer.
fn is_balanced(line: &PlanLine) -> bool {
    line.balance.iter().any(|layers| *layers > 1)
}

fn balance(line: &PlanLine) -> String {
    line.balance.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

fn fits(line: &PlanLine) -> String {
    line.reason.as_ref().map_or("yes".to_owned(), |reason| format!("no: {reason}"))
}

/// Aligns numbers to the right and words to the left.
fn line(row: &[String], widths: &[usize]) -> String {
    let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
        1 | 3 | 4 | 5 => format!("{cell:>width$}"),
        _ => format!("{cell:<width$}"),
    });
    format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
}

/// Formats a number with at most four decimals, without trailing zeros.
fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Formats a time with three digits, in seconds, milliseconds or microseconds.
fn seconds(value: f64) -> String {
    let (scaled, unit) = match value {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "µs"),
    };
    let decimals = if scaled < 10.0 { 2 } else { usize::from(scaled < 100.0) };
    format!("{scaled:.decimals$} {unit}")
}

/// Stage of a plan; its fields are keys of `--json`.
#[derive(Clone, Serialize)]
pub(super) struct StageLine {
    /// Names of the stage's layers.
    layers: Vec<String>,
    #[serde(flatten)]
    planned: PlannedStage,
}

impl StageLine {
    /// Returns the stages of a row, in order.
    pub(super) fn of_row(row: &PlanRow, profile: &Profile) -> Vec<Self> {
        let stages = row.balance.ranges().zip(&row.stages);
        let stage = stages.map(|(range, planned)| Self {
            layers: profile.layers[range].iter().map(|layer| layer.name.clone()).collect(),
            planned: *planned,
        });
        stage.collect()
    }

    fn weights(&self) -> &'static str {
        match self.planned.weights {
            Location::Device => "device",
            Location::Host => "host",
        }
    }

    fn activations(&self) -> &'static str {
        match (self.planned.recompute, self.planned.boundaries) {
            (Recompute::Never, _) => "kept",
            (_, Location::Device) => "recomputed from inputs on the device",
            (_, Location::Host) => "recomputed from inputs on the host",
        }
    }
}

/// Describes activation recomputation: the mode, or the number of stages that recompute.
pub(super) fn recomputed(line: &PlanLine) -> String {
    let (Some(mode), stages) = (line.recompute, &line.stages) else { return "-".to_owned() };
    let again = stages.iter().filter(|stage| stage.planned.recompute != Recompute::Never).count();
    match again {
        // Plain numbers have no stages, so both counts are 0.
        again if again == stages.len() => mode.to_string(),
        0 => Recompute::Never.to_string(),
        again => format!("{again} of {} stages", stages.len()),
    }
}

/// Describes the offloaded stages: how many there are, and their bytes on the host.
pub(super) fn on_host(PlanLine { stages, host_bytes, .. }: &PlanLine) -> String {
    let on_host = stages.iter().filter(|stage| stage.planned.weights == Location::Host).count();
    match on_host {
        0 => "-".to_owned(),
        on_host => format!("{on_host} of {}, {}", stages.len(), Bytes(*host_bytes)),
    }
}

/// Returns whether any stage is offloaded or differs from its neighbour.
fn differ(stages: &[StageLine]) -> bool {
    let is_offloaded = |stage: &StageLine| stage.planned.weights == Location::Host;
    stages.iter().any(is_offloaded)
        || stages.windows(2).any(|pair| pair[0].planned != pair[1].planned)
}

/// Formats one line for each sequence of equal stages, or nothing if all stages are equal and on their devices.
pub(super) fn describe(stages: &[StageLine]) -> String {
    if !differ(stages) {
        return String::new();
    }
    let mut text = String::from("\n");
    let mut first = 0;
    for alike in stages.chunk_by(|a, b| a.planned == b.planned) {
        let last = first + alike.len() - 1;
        let numbers = match alike.len() {
            1 => format!("stage {first}"),
            _ => format!("stages {first} to {last}"),
        };
        let layers: Vec<&String> = alike.iter().flat_map(|stage| &stage.layers).collect();
        let layers = match layers[..] {
            [] => String::new(),
            [only] => only.clone(),
            [first, .., last] => format!("{first} to {last}"),
        };
        let stage = &alike[0];
        text += &format!(
            "{numbers} ({layers}): weights are on the {}, activations are {}\n",
            stage.weights(),
            stage.activations()
        );
        first += alike.len();
    }
    text
}
