//! Tests of the places of stages, and of what they keep, recompute and offload.

use brimful_plan::plan::offload::{OffloadChoice, OffloadError, OffloadRequest, choose};
use brimful_plan::schedule::{
    Costs, HostLinkCost, Location, Recompute, Schedule, StageCost, StageId, StageLocation,
    Transfers, simulate_transfers,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

const GB: u64 = 1_000_000_000;

/// Block of a GPT of width 2,048 in micro-batches of 4 × 1,024 tokens: bf16 compute, f32 masters and AdamW.
fn block() -> StageCost {
    let parameters = 50_000_000;
    StageCost {
        forward: 0.0012,
        backward: 0.0024,
        recompute: 0.0012,
        parameter_bytes: 6 * parameters,
        gradient_bytes: 4 * parameters,
        optimizer_bytes: 8 * parameters,
        offloaded_bytes: 6 * parameters,
        fetched_bytes: 2 * parameters,
        sent_bytes: 4 * parameters,
        update_in_bytes: 12 * parameters,
        update_out_bytes: 10 * parameters,
        activation_bytes: 300_000_000,
        output_bytes: 16_777_216,
        ..StageCost::default()
    }
}

fn gpt() -> Costs {
    let host_link = HostLinkCost { inward: 55e9, outward: 55e9, both: 47e9 };
    Costs { host_link, ..Costs::equal(24, block()) }
}

fn breadth_first(stages: usize) -> Schedule {
    Schedule::BreadthFirst { stages_per_device: stages }
}

fn within(costs: &Costs, memory: u64) -> Result<OffloadChoice, OffloadError> {
    let request = OffloadRequest::new(costs, breadth_first(costs.stages.len()), 1, 8);
    choose(&OffloadRequest { memory: vec![Some(memory)], ..request })
}

#[test]
fn a_model_that_fits_loses_nothing() {
    let costs = gpt();
    let choice = within(&costs, 200 * GB).unwrap();
    assert_eq!(choice.at_host(), 0);
    assert!(choice.transfers.is_empty());
    assert_eq!(choice.recompute, [Recompute::Never; 24]);
    assert_eq!(choice.host_bytes, 0);
}

#[test]
fn more_memory_never_makes_a_longer_step_and_what_fits_stays_on_the_device() {
    let costs = gpt();
    let mut last = f64::INFINITY;
    let [least, _, _, less, more, _] = [5, 12, 20, 40, 60, 80].map(|memory| {
        let choice = within(&costs, memory * GB).unwrap();
        assert!(choice.peak_bytes()[0] <= memory * GB);
        let step = choice.simulation.makespan();
        assert!(step <= last * 1.001, "{memory} GB: {step} after {last}");
        last = step;
        choice.at_host()
    });
    // Transfers of updates take longer than recomputation, which stays while memory lacks for activations.
    assert!(least >= 20 && more <= less && less < least, "{least} {less} {more}");
}

#[test]
fn gradients_stay_on_the_device_unless_a_stage_is_offloaded() {
    let costs = Costs { update_in_backward: true, ..gpt() };
    let [kept, updated] =
        [&gpt(), &costs].map(|costs| within(costs, 200 * GB).unwrap().peak_bytes()[0]);
    assert_eq!(kept, updated);
    // Room for weights and state, 16.8 GB, but not for 4.8 GB of gradients beside them.
    assert!(within(&costs, 20 * GB).unwrap().at_host() > 0);
}

#[test]
fn one_device_buffer_is_taken_where_two_are_too_many() {
    let costs = gpt();
    let mut fitting = (0..100).filter_map(|tenth| within(&costs, tenth * GB / 10).ok());
    assert_eq!(fitting.next().unwrap().transfers.device_buffers(), 1);
    assert!(fitting.any(|choice| choice.transfers.device_buffers() == 2));
}

#[test]
fn nothing_that_fits_is_said_with_numbers() {
    let mut costs = gpt();
    costs.stages[7].fetched_bytes *= 4;
    assert_eq!(
        within(&costs, GB / 10).unwrap_err().to_string(),
        "device 0 needs 1.66 GiB and has 95.4 MiB, with one device buffer for offloaded weights, everything recomputed \
         and boundaries on the host: stage 7 is its largest; cut it finer, or use smaller micro-batches"
    );
    let request = OffloadRequest {
        memory: vec![Some(12 * GB)],
        host_memory: Some(4 * GB),
        ..OffloadRequest::new(&costs, breadth_first(24), 1, 8)
    };
    assert_eq!(
        choose(&request).unwrap_err().to_string(),
        "the host needs 11.5 GiB for the stages that do not fit on their devices, and has 3.73 GiB: use a \
         larger host, more devices, or an optimizer with less state"
    );
    let resident = OffloadRequest { location: Some(Location::Device), ..request.clone() };
    let refused = choose(&resident).unwrap_err().to_string();
    assert!(
        refused.contains("and has 11.2 GiB, with the weights on the device, every"),
        "{refused}"
    );
    assert!(choose(&OffloadRequest { memory: vec![], ..request }).is_err());
}

#[test]
fn a_small_host_leaves_more_on_the_device() {
    let costs = gpt();
    let request = OffloadRequest {
        memory: vec![Some(16 * GB)],
        ..OffloadRequest::new(&costs, breadth_first(24), 1, 8)
    };
    let free = choose(&request).unwrap();
    let bound = OffloadRequest { host_memory: Some(free.host_bytes * 7 / 8), ..request };
    let choice = choose(&bound).unwrap();
    assert!(choice.host_bytes <= free.host_bytes * 7 / 8);
}

#[test]
fn locations_by_hand_are_kept() {
    let costs = gpt();
    let request = OffloadRequest::new(&costs, breadth_first(24), 1, 8);
    let all =
        choose(&OffloadRequest { location: Some(Location::Host), ..request.clone() }).unwrap();
    assert_eq!(all.at_host(), 24);
    let memory = vec![Some(40 * GB)];
    let none =
        choose(&OffloadRequest { location: Some(Location::Device), memory, ..request }).unwrap();
    assert_eq!(none.at_host(), 0);
    assert!(none.recompute.contains(&Recompute::Never));
    assert!(none.recompute.contains(&Recompute::ExceptLast));
}

/// Returns the least time of all ways of all stages that fit, by simulating every one.
fn brute_force(costs: &Costs, m: usize, memory: u64, locations: &[Location]) -> Option<f64> {
    let s = costs.stages.len();
    let all = locations.iter().flat_map(|location| (0..3).map(move |kept| (*location, kept)));
    // Activations of offloaded weights are never kept.
    let ways: Vec<_> = all.filter(|way| *way != (Location::Host, 0)).collect();
    let mut best: Option<f64> = None;
    for number in 0..ways.len().pow(s as u32) {
        let way = |j: usize| ways[number / ways.len().pow(j as u32) % ways.len()];
        let recompute = |stage: StageId| match way(stage.index()).1 {
            0 => Recompute::Never,
            _ => Recompute::ExceptLast,
        };
        let actions = breadth_first(s).actions_by_stage(1, m, recompute).unwrap();
        let location = |j: usize| StageLocation {
            weights: way(j).0,
            boundaries: if way(j).1 == 2 { Location::Host } else { Location::Device },
            trained: true,
        };
        let locations: Vec<_> = (0..s).map(location).collect();
        for device_buffers in 1..=2 {
            let transfers = Transfers::new(&actions, &locations, device_buffers).unwrap();
            let step = simulate_transfers(&actions, &transfers, costs).unwrap();
            if step.devices()[0].peak_bytes <= memory {
                best = Some(best.map_or(step.makespan(), |best| best.min(step.makespan())));
            }
        }
    }
    best
}

fn small_costs() -> impl Strategy<Value = Costs> {
    let stage = (1u32..10, 1u32..10, 1u64..50, 1u64..60, 1u64..12);
    let stage = stage.prop_map(|(forward, backward, weights, activations, output)| StageCost {
        parameter_bytes: 2 * weights,
        gradient_bytes: weights,
        optimizer_bytes: 4 * weights,
        offloaded_bytes: 3 * weights,
        fetched_bytes: weights,
        sent_bytes: weights,
        activation_bytes: activations,
        output_bytes: output,
        ..StageCost::new(f64::from(forward), f64::from(backward), 0.0)
    });
    (prop::collection::vec(stage, 3), 2u32..40).prop_map(|(stages, bandwidth)| {
        let host_link = HostLinkCost::equal(f64::from(bandwidth));
        Costs { stages, input_bytes: 5, host_link, ..Costs::ticks(0) }
    })
}

proptest! {
    // Fixed cases: the result of a search that does not try everything differs from case to case.
    #![proptest_config(ProptestConfig { cases: 60, rng_seed: RngSeed::Fixed(0), ..ProptestConfig::default() })]

    /// With everything on the device only time and bytes of single stages count, and the result is optimal
    /// up to a unit of the knapsack; with offloading it is nearly so.
    #[test]
    fn as_good_as_trying_everything(costs in small_costs(), m in 1usize..4, share in 1u64..40) {
        let whole: u64 = costs.stages.iter().map(|stage| 7 * stage.parameter_bytes / 2 + m as u64 * (stage.activation_bytes + stage.output_bytes)).sum();
        let memory = whole * share / 40;
        let request = OffloadRequest { memory: vec![Some(memory)], ..OffloadRequest::new(&costs, breadth_first(3), 1, m) };
        for (location, locations) in [(Some(Location::Device), &[Location::Device][..]), (None, &[Location::Device, Location::Host][..])] {
            let best = brute_force(&costs, m, memory, locations);
            let choice = choose(&OffloadRequest { location, ..request.clone() });
            match (best, choice) {
                (Some(best), Ok(choice)) => {
                    let ratio = choice.simulation.makespan() / best;
                    prop_assert!(ratio >= 1.0 - 1e-9);
                    // Among 3,000 such cases, one in 400 exceeds 10 %, and the worst has 26 %.
                    prop_assert!(ratio <= 1.25, "{ratio} of {location:?}");
                }
                (None, Err(_)) => {}
                // The bytes in flight at one time depend slightly on the order of the copies.
                (Some(_), Err(OffloadError::DeviceTooSmall { needed, memory, .. })) => {
                    prop_assert!(needed <= memory + memory / 4, "{needed} of {memory}");
                }
                (best, choice) => prop_assert!(false, "{best:?} {:?}", choice.err()),
            }
        }
    }

    #[test]
    fn several_devices_and_any_schedule(
        which in 0usize..7, p in 1usize..=3, m in 1usize..=4, memory in 100u64..3_000,
        costs in small_costs(),
    ) {
        let schedule = Schedule::all(2)[which];
        let stages = p * schedule.stages_per_device();
        let stages = costs.stages.iter().cycle().take(stages).copied().collect();
        let costs = Costs { stages, ..costs };
        let request = OffloadRequest { memory: vec![Some(memory); p], ..OffloadRequest::new(&costs, schedule, p, m) };
        if let Ok(choice) = choose(&request) {
            prop_assert!(choice.peak_bytes().iter().all(|peak| *peak <= memory));
        }
    }
}
