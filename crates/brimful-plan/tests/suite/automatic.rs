//! Tests of schedules made for the times of stages.

use brimful_plan::schedule::{
    ActionKind, Actions, CostError, Costs, Recompute, Schedule, ScheduleRecipe, Simulation,
    StageCost, simulate,
};
use proptest::prelude::*;

/// Returns the named schedules with the placement of an automatic one.
fn alike(automatic: Schedule) -> Vec<Schedule> {
    let all = Schedule::all(automatic.stages_per_device()).into_iter();
    let named = all.filter(|schedule| !schedule.is_automatic());
    let place = |schedule: Schedule| schedule.placement(4);
    named.filter(|schedule| place(*schedule) == place(automatic)).collect()
}

const AUTO_INTERLEAVED: Schedule = Schedule::AutoInterleaved { stages_per_device: 2 };

/// Returns stages with these times of the forward; the whole backward takes twice as long, and its input
/// and weight gradient these shares of it. The first stage has no input gradient. Each holds a byte a
/// micro-batch.
fn stages(forwards: &[f64], [input, weight]: [f64; 2]) -> Costs {
    let stage = |(j, forward): (usize, &f64)| {
        let backward = 2.0 * forward;
        let [input, weight] = if j == 0 { [0.0, 1.0] } else { [input, weight] };
        let split = StageCost::new(*forward, input * backward, weight * backward);
        StageCost { backward, activation_bytes: 1, ..split }
    };
    Costs { stages: forwards.iter().enumerate().map(stage).collect(), ..Costs::ticks(0) }
}

/// Shares of input and weight gradient in a GPT's and a ResNet's backward.
const GPT: [f64; 2] = [0.57, 0.45];
const RESNET: [f64; 2] = [0.68, 0.48];

fn auto(costs: &Costs, held: u64, m: usize, recompute: Recompute) -> (Actions, Simulation) {
    placed(Schedule::Auto, costs, held, m, recompute)
}

fn placed(
    schedule: Schedule,
    costs: &Costs,
    held: u64,
    m: usize,
    recompute: Recompute,
) -> (Actions, Simulation) {
    let memory = vec![Some(held); costs.stages.len() / schedule.stages_per_device()];
    let recipe = ScheduleRecipe::new(schedule, costs.clone(), memory).unwrap();
    let actions = recipe.actions(m, recompute).unwrap();
    let simulation = simulate(&actions, costs).unwrap();
    (actions, simulation)
}

fn peak(simulation: &Simulation) -> u64 {
    simulation.devices().iter().map(|device| device.peak_bytes).max().unwrap()
}

/// Returns the shortest of the named schedules of the same placement that need no more bytes.
fn best_named(
    automatic: Schedule,
    costs: &Costs,
    bytes: u64,
    m: usize,
    recompute: Recompute,
) -> Option<f64> {
    let run = |schedule: Schedule| {
        let devices = costs.stages.len() / schedule.stages_per_device();
        let actions = schedule.actions(devices, m, recompute).unwrap();
        simulate(&actions, costs).unwrap()
    };
    let steps = alike(automatic).into_iter().map(run);
    let fitting = steps.filter(|step| peak(step) <= bytes);
    fitting.map(|step| step.makespan()).min_by(f64::total_cmp)
}

fn weights(actions: &Actions) -> usize {
    let is_weight = |kind| kind == ActionKind::WeightGradient;
    actions.lists().iter().flatten().filter(|action| is_weight(action.kind)).count()
}

#[test]
fn equal_stages_idle_no_more_than_in_zero_bubble_h1() {
    for (s, m) in [(1, 3), (2, 5), (4, 4), (4, 12), (8, 16)] {
        let costs = stages(&vec![1.0; s], [0.5, 0.5]);
        let actions = Schedule::Auto.actions(s, m, Recompute::Never).unwrap();
        let found = simulate(&actions, &costs).unwrap();
        let h1 = Schedule::ZeroBubbleH1.actions(s, m, Recompute::Never).unwrap();
        assert!(found.makespan() <= simulate(&h1, &costs).unwrap().makespan(), "{s} {m}");
        assert!(found.devices().iter().all(|device| device.peak_held <= s), "{s} {m}");
    }
}

/// Zero-bubble H2's memory, twice 1F1B's, fills the bubble that H1 leaves: only the way to the last stage
/// is idle.
#[test]
fn with_twice_the_memory_the_last_stage_hardly_waits() {
    let (s, m) = (8, 16);
    let costs = stages(&[1.0; 8], GPT);
    let shortest = (s - 1) as f64 + 3.0 * m as f64;
    let (_, once) = auto(&costs, s, m, Recompute::Never);
    let (_, twice) = auto(&costs, 2 * s, m, Recompute::Never);
    assert!(twice.makespan() < once.makespan());
    assert!(twice.makespan() < 1.02 * shortest, "{}", twice.makespan());
}

/// Invented times: stages as unequal as a U-Net's (both ends heavy) or an AmoebaNet's, one a device or two,
/// placed in rounds or down and up again. The gains are those of the present search, so that a worse search
/// fails.
#[test]
fn unequal_stages_take_less_than_by_name() {
    let many = [0.6, 1.5, 1.0, 1.1, 0.9, 0.7, 1.2, 0.4];
    let cases: [(Schedule, &[f64], u64, usize, f64); 6] = [
        (Schedule::Auto, &[1.3, 0.8, 0.9, 1.2], 8, 16, 0.95),
        (Schedule::Auto, &[1.4, 1.0, 0.7, 0.5, 0.6, 0.9, 1.2, 1.3], 16, 16, 0.98),
        (Schedule::Auto, &[0.8, 1.3, 1.0, 0.7], 8, 16, 0.995),
        (Schedule::Auto, &many, 16, 16, 0.99),
        (AUTO_INTERLEAVED, &many, 8, 3, 0.95),
        (Schedule::AutoV, &many, 8, 8, 0.95),
    ];
    for (schedule, forwards, held, m, least_gain) in cases {
        let costs = stages(forwards, RESNET);
        let (_, found) = placed(schedule, &costs, held, m, Recompute::Never);
        assert!(peak(&found) <= held);
        let named = best_named(schedule, &costs, held, m, Recompute::Never).unwrap();
        let gain = found.makespan() / named;
        assert!(gain <= least_gain, "{schedule} {forwards:?}: {gain}");
        for (held, m) in [(8, 1), (8, 3), (8, 4), (8, 8), (16, 12)] {
            let (_, found) = placed(schedule, &costs, held, m, Recompute::Never);
            let Some(named) = best_named(schedule, &costs, held, m, Recompute::Never) else {
                continue;
            };
            let fits = peak(&found) <= held && found.makespan() <= named * (1.0 + 1e-9);
            assert!(fits, "{schedule} {forwards:?}: {m} in {held}");
        }
    }
}

#[test]
fn every_schedule_places_its_stages_where_it_says() {
    for schedule in Schedule::all(3) {
        for (devices, m) in [(1, 1), (2, 3), (4, 5)] {
            let actions = schedule.actions(devices, m, Recompute::Never).unwrap();
            assert_eq!(actions.placement(), schedule.placement(devices), "{schedule}");
        }
    }
    assert_eq!(alike(Schedule::AutoV), [Schedule::ZeroBubbleV]);
}

#[test]
fn of_equal_steps_the_one_that_holds_less_is_taken_though_no_bytes_are_known() {
    let recipe = ScheduleRecipe::new(Schedule::Auto, Costs::ticks(8), vec![None; 8]).unwrap();
    let actions = recipe.actions(24, Recompute::Never).unwrap();
    let step = simulate(&actions, &Costs::ticks(8)).unwrap();
    assert_eq!(step.makespan(), 79.0);
    assert!(step.devices().iter().all(|device| device.peak_held <= 8));
}

#[test]
fn backwards_stay_whole_where_splits_gain_nothing() {
    // Split backwards that take twice as long as whole ones.
    let (actions, _) = auto(&stages(&[1.0; 4], [1.0, 1.0]), 4, 32, Recompute::Never);
    assert_eq!(weights(&actions), 0);
    // A single stage never waits.
    let (actions, step) = auto(&stages(&[1.0], GPT), 1, 5, Recompute::Never);
    assert_eq!((weights(&actions), step.makespan()), (0, 15.0));
}

#[test]
fn too_little_memory_lacks_the_least() {
    let costs = stages(&[1.0; 3], GPT);
    let (_, found) = auto(&costs, 0, 6, Recompute::Never);
    assert_eq!(peak(&found), 3, "as little as 1F1B");
}

#[test]
fn a_recipe_needs_costs_of_all_its_devices() {
    let error = ScheduleRecipe::new(Schedule::Auto, Costs::ticks(3), vec![None; 4]).unwrap_err();
    assert_eq!(error, CostError::WrongStages { given: 3, needed: 4 });
    let recipe = ScheduleRecipe::new(Schedule::Auto, Costs::ticks(3), vec![None; 3]).unwrap();
    assert!(recipe.actions(0, Recompute::Never).is_err());
    assert!(recipe.actions(usize::MAX, Recompute::Never).is_err());
    // Infinite times cannot be compared, which is no reason to fail.
    let endless = Costs::equal(3, StageCost::new(f64::MAX, f64::MAX, 0.0));
    assert!(
        ScheduleRecipe::new(Schedule::Auto, endless, vec![None; 3])
            .unwrap()
            .actions(4, Recompute::Never)
            .is_ok()
    );
}

fn costs() -> impl Strategy<Value = Costs> {
    let time = || 0u32..100;
    let stage = (time(), time(), time(), 50u32..=100, 0u64..4, 0u64..3).prop_map(
        |(f, i, w, whole, activations, output)| {
            let [f, i, w] = [f, i, w].map(f64::from);
            let backward = (i + w) * f64::from(whole) / 100.0;
            let bytes = StageCost {
                activation_bytes: activations,
                output_bytes: output,
                ..StageCost::new(f, i, w)
            };
            StageCost { backward, ..bytes }
        },
    );
    (prop::collection::vec(stage, 1..7), 0u32..10, 1u32..20).prop_map(
        |(stages, latency, bandwidth)| {
            let mut costs = Costs { stages, input_bytes: 1, ..Costs::ticks(0) };
            costs.link.latency = f64::from(latency);
            costs.link.bandwidth = f64::from(bandwidth) / 10.0;
            costs
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// For any times of the stages: every action is there, the memory suffices if any named schedule's
    /// does, and the step is no longer than theirs.
    #[test]
    fn never_longer_than_the_best_named_one_that_fits(
        costs in costs(), m in 1usize..14, memory_limit in 1u64..60,
        schedule in prop::sample::select(vec![Schedule::Auto, AUTO_INTERLEAVED, Schedule::AutoV]),
        recompute in prop::sample::select(Recompute::ALL.to_vec()),
    ) {
        let mut costs = costs;
        let devices = costs.stages.len().div_ceil(schedule.stages_per_device());
        costs.stages.resize(devices * schedule.stages_per_device(), costs.stages[0]);
        let (actions, found) = placed(schedule, &costs, memory_limit, m, recompute);
        prop_assert_eq!((actions.stages(), actions.micro_batches()), (costs.stages.len(), m));
        prop_assert_eq!(actions.placement(), schedule.placement(devices));
        if let Some(named) = best_named(schedule, &costs, memory_limit, m, recompute) {
            prop_assert!(peak(&found) <= memory_limit);
            prop_assert!(found.makespan() <= named * (1.0 + 1e-9));
        }
        prop_assert_eq!(actions.to_string().parse::<Actions>(), Ok(actions));
    }
}
