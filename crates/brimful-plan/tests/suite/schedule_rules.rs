//! Properties of every schedule, for any numbers.

use std::collections::HashSet;

use brimful_plan::schedule::{
    Action, ActionKind, Actions, Costs, Recompute, Schedule, ScheduleError, StageCost, StageId,
    render, simulate,
};
use proptest::prelude::*;

/// Returns the named schedules; the automatic ones, which need a search, have tests of their own.
fn named(v: usize) -> impl Iterator<Item = Schedule> {
    Schedule::all(v).into_iter().filter(|schedule| !schedule.is_automatic())
}

fn schedule() -> impl Strategy<Value = Schedule> {
    (1usize..=4).prop_flat_map(|v| prop::sample::select(named(v).collect::<Vec<_>>()))
}

fn recompute() -> impl Strategy<Value = Recompute> {
    prop::sample::select(Recompute::ALL.to_vec())
}

fn costs(stages: usize) -> impl Strategy<Value = Costs> {
    let time = || 0u32..1000;
    let stage = (time(), time(), time(), time()).prop_map(|(f, i, w, b)| StageCost {
        backward: f64::from(b),
        ..StageCost::new(f64::from(f), f64::from(i), f64::from(w))
    });
    (prop::collection::vec(stage, stages), 0u32..10).prop_map(|(stages, latency)| {
        let mut costs = Costs { stages, ..Costs::ticks(0) };
        costs.link.latency = f64::from(latency);
        costs
    })
}

/// Returns a lower bound on a step: its busiest device, or one micro-batch's way there and back.
fn lower_bound(actions: &Actions, costs: &Costs) -> f64 {
    let time = |action: &Action| {
        let cost = &costs.stages[action.stage.index()];
        match action.kind {
            ActionKind::Forward => cost.forward,
            ActionKind::Backward => cost.backward,
            ActionKind::InputGradient => cost.input_gradient,
            ActionKind::WeightGradient => cost.weight_gradient,
            ActionKind::Recompute => cost.recompute,
        }
    };
    let busiest =
        actions.lists().iter().map(|list| list.iter().map(time).sum::<f64>()).fold(0.0, f64::max);
    let first =
        |action: &&Action| action.micro_batch.0 == 0 && action.kind != ActionKind::WeightGradient;
    let way = |action: &&Action| action.kind != ActionKind::Recompute;
    let there_and_back: f64 =
        actions.lists().iter().flatten().filter(first).filter(way).map(time).sum();
    f64::max(busiest, there_and_back)
}

/// Returns the places needed: one, unless every boundary waits for the whole mini-batch.
fn most_places(schedule: Schedule, actions: &Actions) -> usize {
    let waits = matches!(schedule, Schedule::BreadthFirst { .. });
    if waits { actions.micro_batches() } else { 1 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// `actions` validates its result, so an `Ok` is valid.
    #[test]
    fn valid_with_one_place_and_never_below_the_bound(
        (schedule, actions, costs) in (schedule(), 1usize..=32, 1usize..=128, recompute())
            .prop_map(|(schedule, p, m, recompute)| {
                (schedule, schedule.actions(p, m, recompute).expect("valid for all numbers"))
            })
            .prop_flat_map(|(schedule, actions)| {
                let costs = costs(actions.stages());
                (Just(schedule), Just(actions), costs)
            })
    ) {
        let simulation = simulate(&actions, &costs).unwrap();
        prop_assert!(simulation.makespan() >= lower_bound(&actions, &costs));
        prop_assert!((0.0..=1.0).contains(&simulation.bubble()));
        prop_assert!(actions.channel_capacity() <= most_places(schedule, &actions));
        prop_assert_eq!(actions.to_string().parse::<Actions>(), Ok(actions));
    }

    /// GPipe holds all micro-batches, 1F1B as many as there are stages from its own on. With recomputation,
    /// each holds one micro-batch's activations at a time, because the whole backward runs in one piece.
    #[test]
    fn stages_hold_what_their_schedule_says(s in 1usize..=32, m in 1usize..=128, recompute in recompute()) {
        let keeps = |most: usize| if recompute == Recompute::Never { most } else { 1 };
        let held = |schedule: Schedule| {
            let actions = schedule.actions(s, m, recompute).unwrap();
            (0..s).map(|j| actions.held(StageId::at(j))).collect::<Vec<_>>()
        };
        prop_assert_eq!(held(Schedule::GPipe), vec![keeps(m); s]);
        let to_the_last = (1..=s).rev().map(|stages| keeps(stages.min(m)));
        prop_assert_eq!(held(Schedule::OneFOneB), to_the_last.collect::<Vec<_>>());
    }

    #[test]
    fn no_numbers_panic(which in 0usize..8, v in any::<usize>(), p in any::<usize>(), m in any::<usize>()) {
        let large = |n: usize| n > 40;
        let schedule = Schedule::all(v)[which];
        let result = schedule.actions(p, m, Recompute::Always);
        if large(p) && large(m) && p.checked_mul(m).is_none() {
            prop_assert!(result.is_err());
        }
    }

    #[test]
    fn no_text_panics(text in r"([0-9]{0,3}[FBIWRx]?[0-9]{0,3}[,\n #]?){0,40}") {
        let _ = text.parse::<Actions>();
        let _ = text.parse::<Schedule>();
    }

    /// Any change to a valid list is refused with the place marked, or leaves it valid.
    #[test]
    fn damage_is_found(
        schedule in schedule(), p in 1usize..=4, m in 1usize..=6, recompute in recompute(),
        at in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(), how in 0u8..4,
    ) {
        let good = schedule.actions(p, m, recompute).unwrap();
        let mut lists = good.lists().to_vec();
        let device = at.index(lists.len());
        let (from, to) = (at.index(lists[device].len()), to.index(lists[device].len()));
        match how {
            0 => { lists[device].remove(from); }
            1 => { let action = lists[device][from]; lists[device].insert(to, action); }
            2 => lists[device].swap(from, to),
            _ => lists[device][from].micro_batch.0 += to as u32 + 1,
        }
        let is_recompute = good.lists()[device][from].kind == ActionKind::Recompute;
        match Actions::new(lists) {
            Ok(_) => prop_assert!(how == 2 || is_recompute),
            Err(ScheduleError::Invalid { grid, .. }) => prop_assert!(grid.contains('['), "{grid}"),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn pictures_never_panic(schedule in schedule(), p in 1usize..=5, m in 1usize..=9, width in 0usize..200) {
        let actions = schedule.actions(p, m, Recompute::ExceptLast).unwrap();
        let costs = Costs::ticks(actions.stages());
        let simulation = simulate(&actions, &costs).unwrap();
        let grid = render::grid(&actions).width(width).color(true).to_string();
        prop_assert!(!grid.is_empty());
        let panel = render::Panel { title: "a < b", actions: &actions, simulation: &simulation };
        prop_assert!(render::svg(&[panel]).ends_with("</svg>\n"));
        let trace: serde_json::Value =
            serde_json::from_str(&render::trace(&actions, &costs, &simulation)).unwrap();
        prop_assert!(trace["traceEvents"].is_array());
    }
}

#[test]
fn every_small_size_is_valid() {
    for schedule in (1..=4).flat_map(named).collect::<HashSet<_>>() {
        for p in 1..=9 {
            for m in 1..=20 {
                let actions = schedule.actions(p, m, Recompute::ExceptLast).unwrap();
                let most = most_places(schedule, &actions);
                assert!(actions.channel_capacity() <= most, "{schedule} {p} {m}");
            }
        }
    }
}

#[test]
fn names_round_trip() {
    for schedule in (0..5).flat_map(Schedule::all) {
        assert_eq!(schedule.to_string().parse(), Ok(schedule));
    }
    assert_eq!("interleaved".parse(), Ok(Schedule::Interleaved { stages_per_device: 2 }));
    assert_eq!("breadth-first-8".parse(), Ok(Schedule::BreadthFirst { stages_per_device: 8 }));
    for name in ["", "gpipe-2", "interleaved-", "interleaved-02", "1F1B", "zero-bubble-v-2"] {
        assert!(name.parse::<Schedule>().is_err(), "{name}");
    }
}

/// Lets the optimizer run in the backward: a later stage that shares a parameter has added to its gradient
/// by then.
#[test]
fn on_one_device_a_stage_has_its_last_backward_after_those_behind_it() {
    for (v, recompute) in (1..=3).flat_map(|v| Recompute::ALL.map(|recompute| (v, recompute))) {
        for (schedule, m) in Schedule::all(v).into_iter().flat_map(|s| (1..=8).map(move |m| (s, m)))
        {
            let actions = schedule.actions(1, m, recompute).unwrap();
            let of = |j| move |a: &Action| a.stage == StageId::at(j) && a.kind.releases();
            let end = |j| actions.lists()[0].iter().rposition(of(j));
            let ends: Vec<_> = (0..actions.stages()).map(end).collect();
            assert!(
                ends.is_sorted_by(|before, behind| before > behind),
                "{schedule} {m}: {ends:?}"
            );
        }
    }
}
