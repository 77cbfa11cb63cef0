//! Tests of the transfers between devices and host memory, and of their starts.

use super::fixtures::{breadth_first, location};
use brimful_plan::schedule::{
    Action, ActionKind, Actions, DeviceId, Location, Recompute, Schedule, StageId, StageLocation,
    Transfer, TransferError, TransferKind, TransferRule, Transfers,
};
use proptest::prelude::*;

/// Prints a line for each action before which transfers start.
fn told(list: &[Action], transfers: &[Transfer]) -> String {
    let name = |at: usize| list.get(at).map_or("end".to_owned(), Action::to_string);
    let line = |at: usize| {
        let started = transfers.iter().filter(|one| one.before == at).map(Transfer::to_string);
        let started: Vec<_> = started.collect();
        (!started.is_empty()).then(|| format!("{}: {}\n", name(at), started.join(", ")))
    };
    (0..=list.len()).filter_map(line).collect()
}

#[test]
fn device_buffers_are_for_the_stages_that_are_needed_next() {
    let (host, device) = (StageLocation::HOST, StageLocation::DEVICE);
    let cases: [(&str, &[StageLocation], usize); 3] = [
        ("two_device_buffers_fetch_the_next_stage_while_one_computes", &[host; 4], 2),
        ("one_device_buffer_works_without_overlap", &[host; 3], 1),
        ("a_resident_stage_leaves_the_device_buffers_to_others", &[host, device, host, host], 2),
    ];
    for (name, locations, device_buffers) in cases {
        let actions = breadth_first(locations.len(), 2, Recompute::Never);
        let transfers = Transfers::new(&actions, locations, device_buffers).unwrap();
        insta::assert_snapshot!(name, told(&actions.lists()[0], transfers.of(0)));
    }
}

#[test]
fn boundaries_leave_and_come_back_one_ahead() {
    let actions = breadth_first(2, 3, Recompute::Always);
    let locations = [StageLocation { boundaries: Location::Host, ..StageLocation::DEVICE }; 2];
    let transfers = Transfers::new(&actions, &locations, 2).unwrap();
    insta::assert_snapshot!(told(&actions.lists()[0], transfers.of(0)));
    // If activations are kept, they hold the input: it comes once, and the model's own is never sent.
    let kept = breadth_first(2, 3, Recompute::Never);
    let transfers = Transfers::new(&kept, &locations, 2).unwrap();
    let transferred =
        |kind| -> Vec<_> { of_kind(transfers.of(0), kind).map(|one| one.stage.0).collect() };
    for kind in [
        TransferKind::BoundaryOut,
        TransferKind::BoundaryIn,
        TransferKind::GradientOut,
        TransferKind::GradientIn,
    ] {
        assert_eq!(transferred(kind), [1, 1, 1], "{kind:?}");
    }
}

#[test]
fn weights_cross_once_for_the_forwards_alone() {
    let actions = breadth_first(5, 3, Recompute::Always);
    let transfers = Transfers::of_lists(&forwards(&actions), &[StageLocation::HOST; 5], 2).unwrap();
    let fetched: Vec<_> =
        of_kind(transfers.of(0), TransferKind::Fetch).map(|one| one.stage.0).collect();
    assert_eq!(fetched, [0, 1, 2, 3, 4]);
    assert_eq!(of_kind(transfers.of(0), TransferKind::OffloadGradients).count(), 0);
}

#[test]
fn what_cannot_be_made_is_said() {
    let actions = breadth_first(3, 2, Recompute::Never);
    let refused = |locations: &[StageLocation], device_buffers| {
        Transfers::new(&actions, locations, device_buffers).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&[StageLocation::HOST; 2], 2),
        "locations of 2 stages were given, but the schedule has 3 stages: give one per stage"
    );
    assert_eq!(
        refused(&[StageLocation::HOST; 3], 0),
        "stage 0 is offloaded, but its device has no buffer to fetch it into: set at least one"
    );
}

/// Breaks each rule by one change to valid transfers.
#[test]
fn broken_rules_are_named() {
    let actions = breadth_first(3, 2, Recompute::Always);
    let locations = [StageLocation { boundaries: Location::Host, ..StageLocation::HOST }; 3];
    let good = Transfers::new(&actions, &locations, 2).unwrap().of(0).to_vec();
    let change = |change: &dyn Fn(&mut Vec<Transfer>)| {
        let mut transfers = good.clone();
        change(&mut transfers);
        let error = Transfers::given(actions.lists(), &locations, 2, vec![transfers]).unwrap_err();
        match error {
            TransferError::Broken { device: DeviceId(0), rule } => rule,
            other => panic!("{other}"),
        }
    };
    let first = |kind| good.iter().position(|one| one.kind == kind).unwrap();
    let remove = |kind| change(&|transfers| transfers.retain(|one| *one != good[first(kind)]));
    assert!(
        matches!(remove(TransferKind::Fetch), TransferRule::NotFetched(action) if action.stage.0 == 0)
    );
    assert!(matches!(
        remove(TransferKind::Release),
        TransferRule::DeviceBuffersFull { device_buffers: 2, .. }
    ));
    assert!(matches!(
        remove(TransferKind::OffloadGradients),
        TransferRule::GradientsKept(StageId(2))
    ));
    for kind in [TransferKind::BoundaryOut, TransferKind::GradientOut] {
        assert!(matches!(remove(kind), TransferRule::NothingToTransfer(_)), "{kind:?}");
    }
    for kind in [TransferKind::BoundaryIn, TransferKind::GradientIn] {
        assert!(matches!(remove(kind), TransferRule::BoundaryAway(_)), "{kind:?}");
    }
    let twice = |kind| change(&|transfers| transfers.insert(first(kind), good[first(kind)]));
    assert!(matches!(twice(TransferKind::Fetch), TransferRule::FetchedTwice(_)));
    assert!(matches!(twice(TransferKind::Release), TransferRule::NothingToRelease(_)));
    assert!(matches!(twice(TransferKind::OffloadGradients), TransferRule::NoGradients(_)));
    assert!(matches!(change(&|transfers| transfers.reverse()), TransferRule::OutOfOrder(_)));
    let cut = good.len() - 1;
    assert!(matches!(
        change(&|transfers| transfers.truncate(cut)),
        TransferRule::NeverReleased(StageId(0))
    ));
    let early = change(&|transfers| {
        let mut gradients = transfers.remove(first(TransferKind::OffloadGradients));
        gradients.before -= 1;
        let at = transfers.iter().position(|one| one.before > gradients.before).unwrap();
        transfers.insert(at, gradients);
    });
    assert!(matches!(early, TransferRule::GradientsTooEarly { .. }));
}

/// Returns the actions of an evaluation.
fn forwards(actions: &Actions) -> Vec<Vec<Action>> {
    let forward = |action: &&Action| action.kind == ActionKind::Forward;
    actions.lists().iter().map(|list| list.iter().filter(forward).copied().collect()).collect()
}

fn of_kind(transfers: &[Transfer], kind: TransferKind) -> impl Iterator<Item = &Transfer> {
    transfers.iter().filter(move |one| one.kind == kind)
}

fn schedule() -> impl Strategy<Value = Schedule> {
    (0usize..7, 1usize..=4).prop_map(|(which, v)| Schedule::all(v)[which])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// `new` validates its result, so an `Ok` is valid.
    #[test]
    fn valid_for_every_schedule_location_and_number_of_device_buffers(
        schedule in schedule(), p in 1usize..=5, m in 1usize..=9, device_buffers in 1usize..=4,
        recompute in prop::sample::select(Recompute::ALL.to_vec()),
        locations in prop::collection::vec(location(), 20),
    ) {
        let actions = schedule.actions(p, m, recompute).unwrap();
        let locations = &locations[..actions.stages()];
        let transfers = Transfers::new(&actions, locations, device_buffers).unwrap();
        let evaluation = Transfers::of_lists(&forwards(&actions), locations, device_buffers).unwrap();
        let fetches = |transfers: &Transfers| transfers.lists().iter().flatten().filter(|one| one.kind == TransferKind::Fetch).count();
        let at_host = locations.iter().filter(|location| location.weights == Location::Host).count();
        prop_assert!(fetches(&transfers) >= at_host && fetches(&evaluation) >= at_host);
        let trained = locations.iter().filter(|location| location.weights == Location::Host && location.trained).count();
        let sent = transfers.lists().iter().flatten().filter(|one| one.kind == TransferKind::OffloadGradients);
        prop_assert_eq!(sent.count(), trained);
        if let Schedule::BreadthFirst { stages_per_device: v } = schedule {
            // Once forward and once back, except for those that are in device buffers in between.
            let all = Transfers::new(&actions, &vec![StageLocation::HOST; p * v], device_buffers).unwrap();
            prop_assert_eq!(fetches(&all), p * (2 * v - v.min(device_buffers)));
        }
    }

    /// A fetch starts as soon as a device buffer is free: no device buffer stays free while a stage is needed.
    #[test]
    fn no_device_buffer_waits_while_a_stage_is_needed(
        schedule in schedule(), p in 1usize..=3, m in 1usize..=5, device_buffers in 1usize..=3,
    ) {
        let actions = schedule.actions(p, m, Recompute::Never).unwrap();
        let transfers = Transfers::new(&actions, &vec![StageLocation::HOST; actions.stages()], device_buffers).unwrap();
        for (d, list) in actions.lists().iter().enumerate() {
            let mut inside = 0;
            for (at, _) in list.iter().enumerate() {
                let now = transfers.of(d).iter().filter(|one| one.before == at);
                inside = now.fold(inside, |inside, one| match one.kind {
                    TransferKind::Fetch => inside + 1,
                    TransferKind::Release => inside - 1,
                    _ => inside,
                });
                let mut ahead: Vec<_> = list[at..].iter().map(|action| action.stage).collect();
                ahead.sort();
                ahead.dedup();
                prop_assert_eq!(inside, device_buffers.min(ahead.len()).max(inside.min(device_buffers)));
            }
        }
    }

    /// Any change to valid transfers is refused or leaves them valid; nothing panics.
    #[test]
    fn damage_never_panics(
        schedule in schedule(), p in 1usize..=3, m in 1usize..=4, device_buffers in 1usize..=3,
        locations in prop::collection::vec(location(), 12), at in any::<prop::sample::Index>(),
        to in any::<prop::sample::Index>(), how in 0u8..5,
    ) {
        let actions = schedule.actions(p, m, Recompute::Always).unwrap();
        let locations = &locations[..actions.stages()];
        let mut transfers = Transfers::new(&actions, locations, device_buffers).unwrap().lists().to_vec();
        let device = at.index(transfers.len());
        if transfers[device].is_empty() {
            return Ok(());
        }
        let (from, to) = (at.index(transfers[device].len()), to.index(transfers[device].len()));
        let one = transfers[device][from];
        match how {
            0 => transfers[device].retain(|other| *other != one),
            1 => transfers[device].insert(to, one),
            2 => transfers[device].swap(from, to),
            3 => transfers[device][from].before += to + 1,
            _ => transfers[device][from].stage.0 += to as u32 + 1,
        }
        let result = Transfers::given(actions.lists(), locations, device_buffers, transfers);
        // Removing transfers of a boundary is valid only if both of its transfers are gone.
        prop_assert!(how > 1 || result.is_err());
    }
}

#[test]
fn a_list_of_ones_own_fetches_again_and_again() {
    let mine: Actions = "0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1".parse().unwrap();
    let transfers = Transfers::new(&mine, &[StageLocation::HOST; 2], 1).unwrap();
    assert_eq!(of_kind(transfers.of(0), TransferKind::Fetch).count(), 5);
    let gradients: Vec<_> =
        of_kind(transfers.of(0), TransferKind::OffloadGradients).map(|one| one.before).collect();
    assert_eq!(gradients, [7, 8]);
}
