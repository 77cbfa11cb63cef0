//! Stages of a plan, as lines of text and of JSON: what each keeps, recomputes and offloads.

use brimful::Bytes;
use brimful::balance::Profile;
use brimful::plan::PlanRow;
use brimful::schedule::{Location, Recompute};
use brimful_plan::plan::PlannedStage;
use serde::Serialize;

use super::answers::PlanLine;

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

/// Formats one line for each run of equal stages, or nothing if all stages are equal and on their devices.
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
            "{numbers} ({layers}): weights are on the {}, activations are {}\n",
            stage.weights(),
            stage.activations()
        );
        first += alike.len();
    }
    text
}
