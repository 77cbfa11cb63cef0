//! Tests of simulated steps with offloaded weights.

use super::fixtures::{breadth_first, location};
use brimful_plan::schedule::{
    Costs, HostLinkCost, HostLinkUse, Location, Recompute, Schedule, Simulation, Span, StageCost,
    StageLocation, Transfer, TransferKind, TransferSpan, Transfers, WaitSpan, render, simulate,
    simulate_transfers,
};
use proptest::prelude::*;

/// Returns stages of 10 bytes of weights, a tick for each action, and a link of `bandwidth` bytes a tick.
fn costs(stages: usize, bandwidth: f64) -> Costs {
    let stage = StageCost {
        fetched_bytes: 10,
        sent_bytes: 10,
        gradient_bytes: 20,
        parameter_bytes: 100,
        optimizer_bytes: 1_000,
        ..StageCost::new(1.0, 1.0, 1.0)
    };
    Costs { host_link: HostLinkCost::equal(bandwidth), ..Costs::equal(stages, stage) }
}

fn run(stages: usize, m: usize, device_buffers: usize, bandwidth: f64) -> Simulation {
    let actions = breadth_first(stages, m, Recompute::Never);
    let transfers =
        Transfers::new(&actions, &vec![StageLocation::HOST; stages], device_buffers).unwrap();
    simulate_transfers(&actions, &transfers, &costs(stages, bandwidth)).unwrap()
}

#[test]
fn fetches_hide_behind_compute_where_there_is_enough_of_it() {
    // A fetch takes ten ticks, and so does a forward of ten micro-batches: compute waits only for the first
    // fetch and the last gradients.
    assert_eq!(run(4, 10, 2, 1.0).makespan(), 10.0 + 4.0 * 10.0 * 3.0 + 10.0);
    // Half as many micro-batches: in the forward the link is the bottleneck, in the backward it is not.
    assert_eq!(run(4, 5, 2, 1.0).makespan(), 10.0 * 3.0 + 10.0 + 5.0 + 4.0 * 10.0 + 10.0);
    // One device buffer: compute waits for each of the 4 + 3 fetches.
    assert_eq!(run(4, 10, 1, 1.0).makespan(), 7.0 * 10.0 + 4.0 * 10.0 * 3.0 + 10.0);
}

#[test]
fn both_directions_slow_each_other_down() {
    let actions = breadth_first(2, 1, Recompute::Never);
    let transfers = Transfers::new(&actions, &[StageLocation::HOST; 2], 1).unwrap();
    let host_link = HostLinkCost { inward: 10.0, outward: 10.0, both: 5.0 };
    let step =
        simulate_transfers(&actions, &transfers, &Costs { host_link, ..costs(2, 1.0) }).unwrap();
    let told: Vec<_> = step.host_links()[0]
        .transfers
        .iter()
        .map(|span| (span.transfer.to_string(), span.start, span.end))
        .collect();
    let told: Vec<_> =
        told.iter().map(|(name, start, end)| (name.as_str(), *start, *end)).collect();
    assert_eq!(
        told,
        [
            ("fetch 0", 0.0, 1.0),
            ("fetch 1", 2.0, 3.0),
            // Stage 1's gradients leave while stage 0's weights arrive.
            ("fetch 0", 6.0, 8.0),
            ("offload gradients 1", 6.0, 8.0),
            ("offload gradients 0", 10.0, 11.0),
        ]
    );
    assert_eq!(step.makespan(), 11.0);
}

#[test]
fn device_buffers_take_the_place_of_resident_weights() {
    let resident = |stages: usize| {
        let actions = breadth_first(stages, 2, Recompute::Never);
        simulate(&actions, &costs(stages, 1.0)).unwrap().devices()[0].peak_bytes
    };
    assert_eq!(resident(8), 8 * 1_120);
    // Two device buffers, the gradients of one stage, and those of the one before, however fast they reach the host.
    assert_eq!(run(8, 10, 2, 1.0).devices()[0].peak_bytes, 2 * 10 + 2 * 20);
    assert_eq!(run(16, 10, 2, 1.0).devices()[0].peak_bytes, 2 * 10 + 2 * 20);
    assert_eq!(run(8, 10, 1, f64::INFINITY).devices()[0].peak_bytes, 10 + 2 * 20);
}

#[test]
fn boundaries_on_the_host_free_the_device() {
    let peak_of = |boundaries: Location, stages: usize, m: usize| {
        let actions = breadth_first(stages, m, Recompute::Always);
        let locations = vec![StageLocation { boundaries, ..StageLocation::HOST }; stages];
        let transfers = Transfers::new(&actions, &locations, 2).unwrap();
        let mut costs = costs(stages, f64::INFINITY);
        costs.stages.iter_mut().for_each(|stage| stage.output_bytes = 1_000);
        simulate_transfers(&actions, &transfers, &costs).unwrap().devices()[0].peak_bytes
    };
    let peak = |boundaries, stages| peak_of(boundaries, stages, 4);
    // Two device buffers, gradients, and the boundaries: all of them, or those of the stages that compute.
    assert!(peak(Location::Device, 8) > 7 * 4 * 1_000);
    assert_eq!(peak(Location::Host, 8), peak(Location::Host, 16));
    assert_eq!(peak_of(Location::Host, 8, 4), peak_of(Location::Host, 8, 16));
    assert!(peak(Location::Host, 8) < 10_000);
}

/// Shifted in time, a measured step with its transfers equals the simulated one.
#[test]
fn a_measured_step_keeps_its_transfers() {
    let step = run(3, 4, 2, 5.0);
    let actions = breadth_first(3, 4, Recompute::Never);
    let late = |span: &Span| Span { start: span.start + 7.0, end: span.end + 7.0, ..*span };
    let late_transfer = |span: &TransferSpan| TransferSpan {
        start: span.start + 7.0,
        end: span.end + 7.0,
        ..*span
    };
    let late_wait =
        |span: &WaitSpan| WaitSpan { start: span.start + 7.0, end: span.end + 7.0, ..*span };
    let timeline = vec![step.timeline()[0].iter().map(late).collect::<Vec<_>>()];
    let mut transfers: Vec<_> = step.host_links()[0].transfers.iter().map(late_transfer).collect();
    let release = Transfer { kind: TransferKind::Release, ..transfers[0].transfer };
    transfers.push(TransferSpan { transfer: release, start: 8.0, end: 8.0, bytes: 0 });
    let waits = step.host_links()[0].waits.iter().map(late_wait).collect();
    let host_links = [HostLinkUse { transfers, waits }];
    let measured = Simulation::measured(&actions, &timeline, &host_links, &[]);
    assert_eq!(measured.host_links(), step.host_links(), "a release crosses nothing");
    assert_eq!(measured.timeline(), step.timeline());
    assert_eq!(measured.makespan(), step.makespan());
}

/// Four stages of ten ticks forward; weights take one tick to fetch, and what an update needs two more.
#[test]
fn an_update_comes_with_the_first_fetch_or_with_the_last() {
    let actions = breadth_first(4, 10, Recompute::Never);
    let transfers = Transfers::new(&actions, &[StageLocation::HOST; 4], 2).unwrap();
    let played = |update_in_backward: bool, transfers: &Transfers| {
        let mut costs = Costs { update_in_backward, ..costs(4, 10.0) };
        for stage in &mut costs.stages {
            stage.update_in_bytes = 20;
            stage.update_out_bytes = if update_in_backward { 0 } else { 30 };
        }
        let step = simulate_transfers(&actions, transfers, &costs).unwrap();
        let of = |kind| {
            let all = step.host_links()[0].transfers.iter();
            let of_kind = all.filter(move |span| span.transfer.kind == kind);
            of_kind.map(|span| (span.transfer.stage.0, span.end - span.start)).collect::<Vec<_>>()
        };
        (of(TransferKind::Fetch), of(TransferKind::OffloadState), step.devices()[0].peak_bytes)
    };
    let (fetched, sent, peak) = played(false, &transfers);
    let stages = [0, 1, 2, 3];
    assert_eq!(fetched[..4], stages.map(|stage| (stage, 3.0)), "the update of the step before");
    assert_eq!(fetched[4..], [(1, 1.0), (0, 1.0)], "the weights alone");
    assert_eq!(sent, stages.map(|stage| (stage, 3.0)));
    let (fetched, sent, _) = played(true, &transfers);
    // The last two stages stay in the buffers between forward and backward.
    let expected = [(0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0), (1, 3.0), (0, 3.0)];
    assert_eq!((fetched, sent), (expected.to_vec(), Vec::new()));
    // Frozen stages are not updated.
    let frozen = [StageLocation { trained: false, ..StageLocation::HOST }; 4];
    let frozen = Transfers::new(&actions, &frozen, 2).unwrap();
    let (fetched, sent, _) = played(false, &frozen);
    assert!(sent.is_empty() && fetched.iter().all(|(_, time)| *time == 1.0), "{fetched:?}");
    let without = simulate_transfers(&actions, &transfers, &costs(4, 10.0)).unwrap();
    assert_eq!(peak - without.devices()[0].peak_bytes, 2 * 20, "two buffers");
}

#[test]
fn transfers_of_another_schedule_are_refused() {
    let actions = breadth_first(3, 2, Recompute::Never);
    let other = breadth_first(3, 4, Recompute::Never);
    let transfers = Transfers::new(&other, &[StageLocation::HOST; 3], 2).unwrap();
    assert!(simulate_transfers(&actions, &transfers, &costs(3, 1.0)).is_err());
    let transfers = Transfers::new(&actions, &[StageLocation::HOST; 3], 2).unwrap();
    let refused = simulate_transfers(&actions, &transfers, &costs(3, 0.0)).unwrap_err().to_string();
    assert_eq!(
        refused,
        "the inward bandwidth of the host link is 0: it must be above 0 (infinite for transfers that take no time)"
    );
}

/// Whether compute waits only between its actions, and for one cause at a time.
fn waits_while_idle(spans: &[Span], waits: &[WaitSpan]) -> bool {
    let works =
        |wait: &WaitSpan| spans.iter().any(|span| span.start < wait.end && wait.start < span.end);
    waits.iter().all(|wait| wait.start < wait.end && !works(wait))
        && waits.windows(2).all(|pair| pair[0].end <= pair[1].start)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Without transfers the simulation has the times given by the dependencies.
    #[test]
    fn nothing_is_transferred_as_if_there_were_no_host_link(
        which in 0usize..7, v in 1usize..=3, p in 1usize..=4, m in 1usize..=6, latency in 0u32..4,
    ) {
        let actions = Schedule::all(v)[which].actions(p, m, Recompute::ExceptLast).unwrap();
        let mut costs = costs(actions.stages(), 1.0);
        costs.link.latency = f64::from(latency);
        let transfers = Transfers::new(&actions, &vec![StageLocation::DEVICE; actions.stages()], 0).unwrap();
        prop_assert!(transfers.is_empty());
        let clocked = simulate_transfers(&actions, &transfers, &costs).unwrap();
        let plain = simulate(&actions, &costs).unwrap();
        let times = |step: &Simulation| -> Vec<_> {
            step.timeline().iter().flatten().map(|span| (span.action, span.start, span.end)).collect()
        };
        prop_assert_eq!(times(&clocked), times(&plain));
        prop_assert_eq!(clocked.makespan(), plain.makespan());
        let held = |step: &Simulation| -> Vec<_> { step.devices().iter().map(|d| d.peak_held).collect() };
        prop_assert_eq!(held(&clocked), held(&plain));
    }

    /// Every action and every transfer happens, and no data are used before they arrive.
    #[test]
    fn every_step_comes_to_its_end(
        which in 0usize..7, v in 1usize..=3, p in 1usize..=3, m in 1usize..=5, device_buffers in 1usize..=3,
        locations in prop::collection::vec(location(), 12), bandwidth in 1u32..40, bytes in 0u64..50,
        recompute in prop::sample::select(Recompute::ALL.to_vec()),
    ) {
        let actions = Schedule::all(v)[which].actions(p, m, recompute).unwrap();
        let locations = &locations[..actions.stages()];
        let transfers = Transfers::new(&actions, locations, device_buffers).unwrap();
        let mut costs = costs(actions.stages(), f64::from(bandwidth));
        costs.stages.iter_mut().for_each(|stage| stage.output_bytes = bytes);
        let step = simulate_transfers(&actions, &transfers, &costs).unwrap();
        for (d, list) in actions.lists().iter().enumerate() {
            prop_assert_eq!(step.timeline()[d].len(), list.len());
            let copied = transfers.of(d).iter().filter(|one| one.kind != TransferKind::Release).count();
            let HostLinkUse { transfers, waits } = &step.host_links()[d];
            prop_assert_eq!(transfers.len(), copied);
            for (at, span) in step.timeline()[d].iter().enumerate() {
                let is_needed = |one: &&TransferSpan| {
                    one.transfer.kind == TransferKind::Fetch && one.transfer.stage == span.action.stage && one.transfer.before <= at
                };
                let fetched = transfers.iter().filter(is_needed).map(|one| one.end).fold(0.0, f64::max);
                prop_assert!(fetched <= span.start);
            }
            prop_assert!(waits_while_idle(&step.timeline()[d], waits), "{waits:?}");
        }
        let panel = render::Panel { title: "moves", actions: &actions, simulation: &step };
        prop_assert!(render::svg(&[panel]).ends_with("</svg>\n"));
        let trace: serde_json::Value =
            serde_json::from_str(&render::trace(&actions, &costs, &step)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let spans = events.iter().filter(|event| event["ph"] == "X").count();
        let all = step.timeline().iter().map(Vec::len).sum::<usize>()
            + step.host_links().iter().map(|host_link| host_link.transfers.len() + host_link.waits.len()).sum::<usize>();
        prop_assert_eq!(spans, all);
        prop_assert!(!render::grid_with_transfers(&actions, &transfers).unwrap().to_string().is_empty());
        let plain = simulate(&actions, &costs).unwrap();
        prop_assert!(step.makespan() >= plain.makespan() * (1.0 - 1e-9));
    }
}
