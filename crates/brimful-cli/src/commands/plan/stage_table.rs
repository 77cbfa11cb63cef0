//! What each stage of a step keeps, computes again and leaves on the host, as lines of text and of JSON.

use brimful::Bytes;
use brimful::balance::Profile;
use brimful::plan::{PlanRow, PlannedStage};
use brimful::schedule::{Home, Recompute};
use serde::Serialize;

use super::answers::PlanLine;

/// A stage of a line; its fields are keys of `--json`.
#[derive(Clone, Serialize)]
pub(super) struct StageLine {
    /// The names of its layers.
    layers: Vec<String>,
    #[serde(flatten)]
    planned: PlannedStage,
}

impl StageLine {
    /// Those of a row, in order.
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
            Home::Device => "device",
            Home::Host => "host",
        }
    }

    fn activations(&self) -> &'static str {
        match (self.planned.recompute, self.planned.boundaries) {
            (Recompute::Never, _) => "kept",
            (_, Home::Device) => "computed again, from inputs on the device",
            (_, Home::Host) => "computed again, from inputs on the host",
        }
    }
}

/// What the stages compute again, in a word: a mode, or how many of them do.
pub(super) fn recomputed(line: &PlanLine) -> String {
    let (Some(mode), stages) = (line.recompute, &line.stages) else { return "-".to_owned() };
    let again = stages.iter().filter(|stage| stage.planned.recompute != Recompute::Never).count();
    match again {
        // Plain numbers have no stages of their own.
        again if again == stages.len() => mode.to_string(),
        0 => Recompute::Never.to_string(),
        again => format!("{again} of {} stages", stages.len()),
    }
}

/// How many stages live on the host, and what they take there.
pub(super) fn at_home(PlanLine { stages, host_bytes, .. }: &PlanLine) -> String {
    let at_home = stages.iter().filter(|stage| stage.planned.weights == Home::Host).count();
    match at_home {
        0 => "-".to_owned(),
        at_home => format!("{at_home} of {}, {}", stages.len(), Bytes(*host_bytes)),
    }
}

/// Whether any of the stages lives elsewhere or keeps something else than the first.
fn differ(stages: &[StageLine]) -> bool {
    let lives_away = |stage: &StageLine| stage.planned.weights == Home::Host;
    stages.iter().any(lives_away)
        || stages.windows(2).any(|pair| pair[0].planned != pair[1].planned)
}

/// A line for each run of stages that are alike, where they are not all alike.
pub(super) fn table(stages: &[StageLine]) -> String {
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
            "{numbers} ({layers}): weights live on the {}, activations are {}\n",
            stage.weights(),
            stage.activations()
        );
        first += alike.len();
    }
    text
}
