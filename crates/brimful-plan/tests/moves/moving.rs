//! Shared code of the tests of moves: the breadth-first order, and every place of a stage.

use brimful_plan::schedule::{Actions, Home, Recompute, Schedule, StageHome};
use proptest::prelude::*;

pub fn breadth_first(stages: usize, micro_batches: usize, recompute: Recompute) -> Actions {
    let schedule = Schedule::BreadthFirst { stages_per_device: stages };
    schedule.actions(1, micro_batches, recompute).unwrap()
}

pub fn home() -> impl Strategy<Value = StageHome> {
    let place = || prop::sample::select(vec![Home::Device, Home::Host]);
    (place(), place(), any::<bool>()).prop_map(|(weights, boundaries, trained)| StageHome {
        weights,
        boundaries,
        trained,
    })
}
