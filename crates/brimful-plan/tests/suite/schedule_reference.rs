//! Compares makespans and memory with the literature, to the last digit.

use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{
    Costs, Recompute, Schedule, Simulation, Span, StageCost, StageLocation, Transfers, simulate,
    simulate_transfers,
};

/// Runs a schedule with times of a device, divided over its stages.
fn run(schedule: Schedule, p: usize, m: usize, [f, i, w]: [f64; 3]) -> Simulation {
    let v = schedule.stages_per_device() as f64;
    let actions = schedule.actions(p, m, Recompute::Never).unwrap();
    let costs = Costs::equal(actions.stages(), StageCost::new(f / v, i / v, w / v));
    simulate(&actions, &costs).unwrap()
}

#[track_caller]
fn assert_close(actual: f64, expected: f64) {
    assert!((actual - expected).abs() <= 1e-9 * expected, "{actual} instead of {expected}");
}

const INTERLEAVED_2: Schedule = Schedule::Interleaved { stages_per_device: 2 };
const INTERLEAVED_4: Schedule = Schedule::Interleaved { stages_per_device: 4 };
const BREADTH_FIRST_2: Schedule = Schedule::BreadthFirst { stages_per_device: 2 };
const BREADTH_FIRST_4: Schedule = Schedule::BreadthFirst { stages_per_device: 4 };
const INTERLEAVED_ZB_2: Schedule = Schedule::InterleavedZeroBubble { stages_per_device: 2 };
const INTERLEAVED_ZB_4: Schedule = Schedule::InterleavedZeroBubble { stages_per_device: 4 };

#[test]
fn unequal_costs() {
    let costs = [1.0, 1.2, 0.8];
    assert_close(run(Schedule::OneFOneB, 8, 24, costs).makespan(), 93.0);
    assert_close(run(Schedule::ZeroBubbleH1, 8, 24, costs).makespan(), 81.8);
    assert_close(run(Schedule::ZeroBubbleV, 8, 24, costs).makespan(), 76.2);
}

#[test]
fn fewer_micro_batches_than_devices() {
    assert_eq!(run(Schedule::GPipe, 4, 2, [1.0; 3]).makespan(), 15.0);
    assert_eq!(run(Schedule::ZeroBubbleV, 4, 2, [1.0; 3]).makespan(), 11.0);
}

/// Checks the overheads of the table in `Schedule`'s documentation.
#[test]
fn overheads() {
    for p in 1..=8 {
        for m in (p..=4 * p).chain([8 * p]) {
            let ideal = 3.0 * m as f64;
            let skew = (p - 1) as f64;
            let overhead = |schedule| run(schedule, p, m, [1.0; 3]).makespan() - ideal;
            assert_eq!(overhead(Schedule::GPipe), 3.0 * skew);
            assert_eq!(overhead(Schedule::OneFOneB), 3.0 * skew);
            assert_eq!(overhead(Schedule::ZeroBubbleH1), skew, "{p} {m}");
            assert_eq!(overhead(BREADTH_FIRST_2), 3.0 * skew / 2.0, "{p} {m}");
            assert_eq!(overhead(BREADTH_FIRST_4), 3.0 * skew / 4.0, "{p} {m}");
            // One place in a channel is slightly less than ragged rounds need.
            let slack = if m % p == 0 { 0.0 } else { 0.05 * ideal };
            let rounds = [
                (INTERLEAVED_2, 3.0 * skew / 2.0),
                (INTERLEAVED_4, 3.0 * skew / 4.0),
                (INTERLEAVED_ZB_2, skew / 2.0),
                (INTERLEAVED_ZB_4, skew / 4.0),
            ];
            for (schedule, expected) in rounds {
                let overhead = overhead(schedule);
                let range = expected..=expected + slack;
                assert!(
                    range.contains(&overhead),
                    "{schedule} {p} {m}: {overhead} not in {range:?}"
                );
            }
            if m >= 2 * p - 1 {
                assert_eq!(overhead(Schedule::ZeroBubbleV), skew / 2.0, "{p} {m}");
            }
        }
    }
}

#[test]
fn bubble_of_gpipe() {
    for (s, m) in [(1, 1), (4, 8), (8, 24), (5, 3)] {
        let expected = (s - 1) as f64 / (m + s - 1) as f64;
        assert_close(run(Schedule::GPipe, s, m, [1.0; 3]).bubble() + 1.0, expected + 1.0);
    }
}

/// Returns the activations held, in those of one stage; a device's A is v of them.
fn held(schedule: Schedule, p: usize, m: usize) -> Vec<usize> {
    let simulation = run(schedule, p, m, [1.0; 3]);
    simulation.devices().iter().map(|device| device.peak_held).collect()
}

#[test]
fn peak_activations() {
    for p in 1..=8 {
        let m = 3 * p;
        assert_eq!(held(Schedule::GPipe, p, m), vec![m; p]);
        assert_eq!(held(BREADTH_FIRST_4, p, m), vec![4 * m; p]);
        assert_eq!(held(Schedule::OneFOneB, p, m), (1..=p).rev().collect::<Vec<_>>());
        assert_eq!(held(Schedule::ZeroBubbleH1, p, m), vec![p; p]);
        assert_eq!(held(Schedule::ZeroBubbleV, p, m), vec![2 * p; p]);
        for v in 2..=4 {
            let interleaved = Schedule::Interleaved { stages_per_device: v };
            assert_eq!(held(interleaved, p, m).into_iter().max(), Some(p * v + p - 1));
            let zero_bubble = Schedule::InterleavedZeroBubble { stages_per_device: v };
            assert_eq!(held(zero_bubble, p, m), vec![p * v; p]);
        }
    }
}

#[test]
fn recompute_runs_early() {
    let expected =
        [(Recompute::Never, 33.0), (Recompute::Always, 41.0), (Recompute::ExceptLast, 40.0)];
    for (recompute, makespan) in expected {
        let actions = Schedule::GPipe.actions(4, 8, recompute).unwrap();
        assert_eq!(simulate(&actions, &Costs::ticks(4)).unwrap().makespan(), makespan);
    }
}

#[test]
fn recompute_keeps_inputs_and_one_activation() {
    let (s, m) = (4, 8);
    for recompute in [Recompute::ExceptLast, Recompute::Always] {
        let actions = Schedule::GPipe.actions(s, m, recompute).unwrap();
        let cost = StageCost { activation_bytes: 1000, ..StageCost::new(1.0, 1.0, 1.0) };
        let costs = Costs { input_bytes: 10, ..Costs::equal(s, cost) };
        let first = simulate(&actions, &costs).unwrap().devices()[0];
        assert_eq!(first.peak_bytes, 10 * m as u64 + 1000);
    }
}

#[test]
fn bytes_of_every_sort_count() {
    let cost = StageCost {
        parameter_bytes: 1,
        gradient_bytes: 10,
        optimizer_bytes: 100,
        activation_bytes: 1_000,
        output_bytes: 10_000,
        ..StageCost::new(1.0, 1.0, 1.0)
    };
    let actions = Schedule::OneFOneB.actions(2, 4, Recompute::Never).unwrap();
    let simulation =
        simulate(&actions, &Costs { input_bytes: 7, ..Costs::equal(2, cost) }).unwrap();
    let peaks: Vec<_> = simulation.devices().iter().map(|device| device.peak_bytes).collect();
    // Two micro-batches with their inputs and the output's gradient; one, and the gradients of output and
    // input.
    assert_eq!(peaks, [111 + 2 * 1_007 + 10_000, 111 + 11_000 + 20_000]);
}

/// Breadth first on one device: when the backward reaches a stage, the boundaries after it are gone, and
/// only the stages from there on have sums.
#[test]
fn sums_come_while_boundaries_go() {
    let (stages, m) = (6, 4);
    let schedule = Schedule::BreadthFirst { stages_per_device: stages };
    let actions = schedule.actions(1, m, Recompute::Always).unwrap();
    let cost = |gradient_bytes, cast_bytes| StageCost {
        gradient_bytes,
        cast_bytes,
        output_bytes: 10,
        ..StageCost::new(1.0, 1.0, 1.0)
    };
    let peaks = |cost: StageCost| {
        let costs = Costs { input_bytes: 10, ..Costs::equal(stages, cost) };
        let locations = vec![StageLocation::DEVICE; stages];
        let transfers = Transfers::new(&actions, &locations, 1).unwrap();
        let steps = [simulate(&actions, &costs), simulate_transfers(&actions, &transfers, &costs)];
        steps.map(|step| step.unwrap().devices()[0].peak_bytes)
    };
    // All boundaries, and the working bytes of the last stage: the gradients of its output and of its
    // input.
    let turn = (stages * m * 10 + 2 * 10) as u64;
    assert_eq!(peaks(cost(0, 0))[0], turn);
    // Sums smaller than a stage's boundaries fit into the memory that these leave, except for the gradients
    // that wait in their place.
    let few = turn + 30..=turn + 30 + m as u64 * 10;
    assert!(peaks(cost(30, 0)).iter().all(|peak| few.contains(peak)));
    // Larger sums peak in the first stage's backward; their casts come when all else is gone.
    let sums = (stages * 1_000) as u64;
    assert!(peaks(cost(1_000, 0)).iter().all(|peak| (sums..sums + 2 * turn).contains(peak)));
    assert_eq!(peaks(cost(1_000, 500)), [sums + 3_000; 2]);
}

#[test]
fn work_counts_while_it_is_done() {
    let cost = StageCost {
        activation_bytes: 100,
        forward_peak: 130,
        backward_peak: 170,
        fresh_bytes: 1_000,
        output_bytes: 10,
        ..StageCost::new(1.0, 1.0, 1.0)
    };
    let peak = |cost: StageCost| {
        let actions = Schedule::GPipe.actions(1, 2, Recompute::Never).unwrap();
        simulate(&actions, &Costs::equal(1, cost)).unwrap().devices()[0].peak_bytes
    };
    // Two micro-batches' activations; the second one's backward, and its gradients before they are summed.
    assert_eq!(peak(cost), 100 + 170 + 1_000);
    assert_eq!(peak(StageCost { fresh_bytes: 0, ..cost }), 100 + 170);
    // An unknown peak of the backward is at least the gradient of the output.
    assert_eq!(peak(StageCost { fresh_bytes: 0, backward_peak: 0, ..cost }), 100 + 130);
    assert_eq!(peak(StageCost { fresh_bytes: 0, backward_peak: 0, forward_peak: 0, ..cost }), 210);
}

#[test]
fn transfers_take_their_time() {
    let actions = Schedule::GPipe.actions(2, 2, Recompute::Never).unwrap();
    let mut costs = Costs::ticks(2);
    costs.link.latency = 0.5;
    // The last boundary and the first gradient each arrive half a tick late.
    assert_eq!(simulate(&actions, &costs).unwrap().makespan(), 10.0);
    costs.link.latency = 0.0;
    costs.link.bandwidth = 1.0;
    for stage in &mut costs.stages {
        stage.output_bytes = 3;
    }
    // One at a time in each direction: the boundaries arrive at 4 and 7, the gradients (made at 10 and 12)
    // at 13 and 16.
    assert_eq!(simulate(&actions, &costs).unwrap().makespan(), 18.0);
}

/// Shifted in time, a measured step equals the simulated one.
#[test]
fn a_measured_step_is_reported_as_a_simulated_one() {
    let actions = Schedule::OneFOneB.actions(3, 5, Recompute::Never).unwrap();
    let simulated = simulate(&actions, &Costs::ticks(3)).unwrap();
    let late = |span: &Span| Span { start: span.start + 7.0, end: span.end + 7.0, ..*span };
    let timeline: Vec<Vec<_>> =
        simulated.timeline().iter().map(|spans| spans.iter().map(late).collect()).collect();
    assert_eq!(Simulation::measured(&actions, &timeline, &[], &[]), simulated);
    let counted = Simulation::measured(&actions, &timeline, &[], &[None, Some(Bytes(9))]);
    let peaks: Vec<_> = counted.devices().iter().map(|device| device.peak_bytes).collect();
    assert_eq!(peaks, [0, 9, 0]);
    // The measured times of its actions simulate it again.
    let again = simulate(&actions, &Costs::measured(&actions, &timeline)).unwrap();
    assert_eq!(again.timeline(), simulated.timeline());
}

#[test]
fn a_span_has_the_bytes_that_its_device_holds_meanwhile() {
    let actions = Schedule::OneFOneB.actions(2, 2, Recompute::Never).unwrap();
    let cost =
        StageCost { parameter_bytes: 100, activation_bytes: 10, ..StageCost::new(1.0, 1.0, 1.0) };
    let step = simulate(&actions, &Costs::equal(2, cost)).unwrap();
    let bytes = |device: usize| step.timeline()[device].iter().map(|span| span.bytes);
    assert_eq!(bytes(0).collect::<Vec<_>>(), [110, 120, 120, 110]);
    assert_eq!(bytes(1).collect::<Vec<_>>(), [110, 110, 110, 110]);
}
