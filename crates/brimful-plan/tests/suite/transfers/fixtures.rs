//! Shared code of the tests of transfers: the breadth-first order, and every place of a stage.

use brimful_plan::schedule::{Actions, Location, Recompute, Schedule, StageLocation};
use proptest::prelude::*;

pub fn breadth_first(stages: usize, micro_batches: usize, recompute: Recompute) -> Actions {
    let schedule = Schedule::BreadthFirst { stages_per_device: stages };
    schedule.actions(1, micro_batches, recompute).unwrap()
}

pub fn location() -> impl Strategy<Value = StageLocation> {
    let place = || prop::sample::select(vec![Location::Device, Location::Host]);
    (place(), place(), any::<bool>()).prop_map(|(weights, boundaries, trained)| StageLocation {
        weights,
        boundaries,
        trained,
    })
}
