//! Grids of every schedule, as documentation.

use brimful_plan::schedule::{Location, Recompute, Schedule, StageLocation, Transfers, render};

fn show(schedule: Schedule, recompute: Recompute) -> String {
    render::grid(&schedule.actions(4, 8, recompute).unwrap()).to_string()
}

macro_rules! grids {
    ($($name:ident: $schedule:expr, $recompute:ident;)*) => {
        $(#[test]
        fn $name() {
            insta::assert_snapshot!(show($schedule, Recompute::$recompute));
        })*
    };
}

grids! {
    gpipe: Schedule::GPipe, Never;
    gpipe_recompute_except_last: Schedule::GPipe, ExceptLast;
    one_f_one_b: Schedule::OneFOneB, Never;
    one_f_one_b_recompute_always: Schedule::OneFOneB, Always;
    interleaved: Schedule::Interleaved { stages_per_device: 2 }, Never;
    breadth_first: Schedule::BreadthFirst { stages_per_device: 2 }, Never;
    zero_bubble_h1: Schedule::ZeroBubbleH1, Never;
    interleaved_zero_bubble: Schedule::InterleavedZeroBubble { stages_per_device: 2 }, Never;
    zero_bubble_v: Schedule::ZeroBubbleV, Never;
}

#[test]
fn a_host_link_has_a_row_each_way_under_its_device() {
    let schedule = Schedule::BreadthFirst { stages_per_device: 3 };
    let actions = schedule.actions(1, 3, Recompute::Always).unwrap();
    let mut locations = [StageLocation::HOST; 3];
    locations[0].boundaries = Location::Host;
    let transfers = Transfers::new(&actions, &locations, 2).unwrap();
    insta::assert_snapshot!(render::grid_with_transfers(&actions, &transfers).unwrap());
    let two = schedule.actions(2, 2, Recompute::Never).unwrap();
    let transfers = Transfers::new(&two, &[StageLocation::HOST; 6], 1).unwrap();
    insta::assert_snapshot!(render::grid_with_transfers(&two, &transfers).unwrap());
}

#[test]
fn folded() {
    let actions = Schedule::OneFOneB.actions(3, 4, Recompute::Never).unwrap();
    insta::assert_snapshot!(render::grid(&actions).width(40));
}

/// The grid in each schedule's module page equals the grid of its code.
#[test]
fn the_sources_show_their_grids() {
    let interleaved = Schedule::Interleaved { stages_per_device: 2 };
    let breadth_first = Schedule::BreadthFirst { stages_per_device: 2 };
    let drawn = [
        (include_str!("../../src/schedule/breadth_first.rs"), Schedule::GPipe, 4, 4),
        (include_str!("../../src/schedule/one_f_one_b.rs"), Schedule::OneFOneB, 4, 4),
        (include_str!("../../src/schedule/interleaved.rs"), interleaved, 2, 2),
        (include_str!("../../src/schedule/breadth_first.rs"), breadth_first, 2, 2),
        (include_str!("../../src/schedule/zero_bubble.rs"), Schedule::ZeroBubbleH1, 4, 4),
        (include_str!("../../src/schedule/zero_bubble_v.rs"), Schedule::ZeroBubbleV, 2, 3),
    ];
    for (source, schedule, p, m) in drawn {
        let grid = render::grid(&schedule.actions(p, m, Recompute::Never).unwrap()).to_string();
        for row in grid.lines().skip(1) {
            assert!(source.contains(&format!("//! {row}\n")), "{schedule}: {row}");
        }
    }
}
