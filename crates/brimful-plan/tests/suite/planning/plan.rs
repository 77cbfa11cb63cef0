//! Tests of the planner's choices.

use brimful_plan::balance::{LayerCost, Profile};
use brimful_plan::plan::{Plan, PlanDevice, PlanError, PlanRow, PlannedStep, Request, plan};
use brimful_plan::schedule::{ActionKind, HostLinkCost, Recompute, Schedule};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// Returns layers that keep 1 MiB a sample and have 4 MiB of parameters.
fn model(layers: usize) -> Profile {
    let layer = LayerCost {
        name: "block".into(),
        forward: 1.0,
        backward: 2.0,
        parameter_bytes: 4 * MIB,
        activation_bytes: MIB,
        output_bytes: MIB / 8,
        ..LayerCost::default()
    };
    Profile { input_bytes: 1024, layers: vec![layer; layers] }
}

fn devices(count: usize, memory: Option<u64>) -> Vec<PlanDevice> {
    vec![PlanDevice { memory, ..PlanDevice::default() }; count]
}

#[test]
fn without_a_limit_the_shortest_step_wins() {
    let profile = model(16);
    let plan = plan(&Request::new(&profile, devices(4, None), 64)).unwrap();
    let best = plan.best().unwrap();
    assert_eq!(best.choice.recompute, Recompute::Never);
    assert!(plan.rows.iter().all(|row| row.fits && row.makespan >= plan.rows[0].makespan));
    assert_eq!(best.choice, plan.rows[0].choice);
    assert_eq!(plan.rows.len(), Schedule::all(2).len() * 12);
}

#[test]
fn of_equals_the_one_with_less_memory_wins() {
    let profile = model(4);
    let mut request = Request::new(&profile, devices(4, None), 64);
    request.schedules = vec![Schedule::GPipe, Schedule::OneFOneB];
    assert_eq!(plan(&request).unwrap().rows[0].choice.schedule, Schedule::OneFOneB);
}

/// Layers that get longer towards the middle, in stages that no balance makes equal.
#[test]
fn an_automatic_list_is_planned_for_its_balance_and_can_be_made_again() {
    let mut profile = model(6);
    for (layer, time) in profile.layers.iter_mut().zip([1.0, 3.0, 2.0, 5.0, 1.5, 2.5]) {
        (layer.forward, layer.backward) = (time, 2.0 * time);
    }
    let mut request = Request::new(&profile, devices(4, Some(120 * MIB)), 32);
    request.micro_batches = vec![8];
    request.recompute = Some(Recompute::Never);
    let plan = plan(&request).unwrap();
    let row = |schedule| plan.rows.iter().find(|row| row.choice.schedule == schedule).unwrap();
    let auto = row(Schedule::Auto);
    for named in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZeroBubbleH1].map(row) {
        assert!(!named.fits || auto.makespan <= named.makespan, "{}", named.choice);
    }
    assert!(auto.fits && auto.makespan < row(Schedule::OneFOneB).makespan);
    let step = PlannedStep::new(&request, auto).unwrap();
    assert_eq!(step.simulation.makespan(), auto.makespan);
    // Any other number of micro-batches, as a ragged mini-batch has, has a list too.
    let recipe = auto.recipe.as_ref().unwrap();
    let ragged = recipe.actions(3, Recompute::Never).unwrap();
    assert_eq!((ragged.stages(), ragged.micro_batches()), (4, 3));
}

#[test]
fn a_split_that_was_not_measured_takes_longer_than_the_whole() {
    let layer = LayerCost { backward: 100.0, ..LayerCost::default() };
    let (input, weight) = layer.split_backward();
    assert_eq!((input.round(), weight.round()), (57.0, 45.0));
    let measured = LayerCost { input_gradient: Some(60.0), ..layer.clone() };
    assert_eq!(measured.split_backward().1.round(), 42.0);
    let less = LayerCost { input_gradient: Some(30.0), weight_gradient: Some(60.0), ..layer };
    let profile = Profile { layers: vec![less], ..Profile::default() };
    let error = profile.check().unwrap_err().to_string();
    assert!(
        error.contains("dX (30) plus dW (60) is shorter than the whole backward (100)"),
        "{error}"
    );
}

/// The times of a split backward decide; a profile without them has a transformer's.
#[test]
fn a_split_is_proposed_only_where_it_wins() {
    let split = |input: Option<f64>, weight: Option<f64>| {
        let mut profile = model(8);
        for layer in &mut profile.layers {
            (layer.input_gradient, layer.weight_gradient) = (input, weight);
        }
        let mut request = Request::new(&profile, devices(4, None), 16);
        request.micro_batches = vec![8];
        request.recompute = Some(Recompute::Never);
        let plan = plan(&request).unwrap();
        let step = PlannedStep::new(&request, plan.best().unwrap()).unwrap();
        let is_half = |kind| kind == ActionKind::WeightGradient;
        step.actions.lists().iter().flatten().any(|action| is_half(action.kind))
    };
    assert!(split(Some(1.1), Some(1.0)));
    assert!(split(None, None));
    assert!(!split(Some(2.0), Some(2.0)));
}

/// A layer without weights has no weight gradient, and its input gradient has all of the overhead.
#[test]
fn a_split_shares_the_overhead_as_it_shares_the_time() {
    let mut profile = model(2);
    let relu = LayerCost {
        input_gradient: Some(2.0),
        weight_gradient: Some(0.0),
        ..profile.layers[0].clone()
    };
    profile.layers[1] = LayerCost { overhead: 4.0, ..relu };
    let mut request = Request::new(&profile, devices(2, None), 6);
    request.micro_batches = vec![2];
    let row = &plan(&request).unwrap().rows[0];
    let stage = PlannedStep::new(&request, row).unwrap().costs.stages[1];
    assert_eq!((stage.backward, stage.input_gradient, stage.weight_gradient), (10.0, 10.0, 0.0));
}

/// A weight gradient may need more than the forward has kept; whole backwards never hold it.
#[test]
fn what_is_held_between_dx_and_dw_counts() {
    let peaks = |split_bytes: Option<u64>, schedule: Schedule| {
        let mut profile = model(4);
        profile.layers.iter_mut().for_each(|layer| layer.split_bytes = split_bytes);
        let mut request = Request::new(&profile, devices(4, None), 8);
        request.schedules = vec![schedule];
        request.micro_batches = vec![8];
        request.recompute = Some(Recompute::Never);
        plan(&request).unwrap().rows[0].peak_bytes.clone()
    };
    let (unknown, twice) = (None, Some(2 * MIB));
    assert_eq!(peaks(unknown, Schedule::OneFOneB), peaks(twice, Schedule::OneFOneB));
    let (before, after) = [unknown, twice].map(|split| peaks(split, Schedule::ZeroBubbleH1)).into();
    // The first stage's input gradient is never needed: its memory is unchanged.
    assert_eq!(before[0], after[0]);
    // The last stage holds four micro-batches, of which up to four are between input and weight gradient;
    // each had 1 MiB of its own and an eighth for the input.
    let more = after[3] - before[3];
    assert!((3 * 7 * MIB / 8..=4 * 7 * MIB / 8).contains(&more), "{more}");
}

#[test]
fn what_does_not_fit_says_why() {
    let profile = model(16);
    let mut request = Request::new(&profile, devices(4, Some(100 * MIB)), 64);
    request.micro_batches = vec![8];
    request.recompute = Some(Recompute::Never);
    let plan = plan(&request).unwrap();
    let best = plan.best().unwrap();
    assert!(best.peak_bytes.iter().all(|peak| *peak <= 100 * MIB));
    let gpipe = |row: &&brimful_plan::plan::PlanRow| row.choice.schedule == Schedule::GPipe;
    let gpipe = plan.rows.iter().find(gpipe).unwrap();
    assert!(!gpipe.fits);
    // 8 micro-batches of 8 samples: four layers' activations and an eighth for the input; gradients, their
    // sums, and those of a micro-batch beside them.
    assert_eq!(gpipe.misfits[0].to_string(), "device 0 needs 305 MiB, but has 100 MiB");
    let fits: Vec<_> = plan.rows.iter().map(|row| row.fits).collect();
    assert!(fits.is_sorted_by(|a, b| a >= b), "what fits comes first");
}

/// The first stage of 1F1B holds the most micro-batches, so under a limit it gets fewer layers.
#[test]
fn the_balance_follows_the_memory() {
    let profile = model(16);
    let mut request = Request::new(&profile, devices(4, Some(100 * MIB)), 32);
    request.schedules = vec![Schedule::OneFOneB];
    request.micro_batches = vec![8];
    request.recompute = Some(Recompute::Never);
    let plan = plan(&request).unwrap();
    let best = plan.best().unwrap();
    assert!(best.balance.sizes().is_sorted(), "{}", best.balance);
    assert!(best.balance.sizes()[0] < 4, "{}", best.balance);
}

#[test]
fn a_fast_device_gets_more_layers() {
    let profile = model(12);
    let mut request = Request::new(&profile, devices(2, None), 8);
    request.devices[0].speed = 2.0;
    request.schedules = vec![Schedule::GPipe];
    assert_eq!(plan(&request).unwrap().rows[0].balance.sizes(), [8, 4]);
}

#[test]
fn overhead_keeps_micro_batches_large() {
    let mut profile = model(8);
    profile.layers.iter_mut().for_each(|layer| layer.overhead = 4.0);
    let plan = plan(&Request::new(&profile, devices(2, None), 64)).unwrap();
    assert!(plan.best().unwrap().choice.micro_batches < 64);
}

#[test]
fn what_cannot_be_built_is_said() {
    let profile = model(6);
    let request = Request::new(&profile, devices(4, None), 64);
    let Plan { rows, refused } = plan(&request).unwrap();
    assert_eq!((rows.len(), refused.len()), (4 * 12, 6 * 12));
    assert_eq!(
        refused[0].to_string(),
        "interleaved-2, m = 1, recompute never: 8 stages need at least 8 layers, but the model has 6: use \
         at most 6 stages, or cut the layers finer"
    );
    let none = plan(&Request::new(&profile, devices(7, None), 64)).unwrap_err();
    assert!(matches!(none, PlanError::NothingBuilt { count: 120, .. }));
}

/// Eight layers with 4 MiB of parameters, as many gradients and twice the optimizer state, in 40 MiB.
#[test]
fn what_fits_in_no_other_way_lives_on_the_host() {
    let profile = model(8);
    let mut request = Request::new(&profile, devices(1, Some(40 * MIB)), 8);
    request.optimizer_bytes = 2.0;
    request.micro_batches = vec![2, 8];
    request.host_link = HostLinkCost::equal(4.0 * MIB as f64);
    assert!(plan(&request).unwrap().best().is_none());
    request.host_memory = Some(1 << 30);
    let found = plan(&request).unwrap();
    let best = found.best().unwrap();
    assert_eq!(best.choice.schedule, Schedule::BreadthFirst { stages_per_device: 8 });
    assert!(best.at_host() > 0 && best.host_bytes > 0 && best.peak_bytes[0] <= 40 * MIB);
    let step = PlannedStep::new(&request, best).unwrap();
    assert_eq!(step.simulation.makespan(), best.makespan);
    assert!(!step.simulation.host_links()[0].transfers.is_empty());
    // A host that is too small does not help.
    request.host_memory = Some(MIB);
    assert!(plan(&request).unwrap().best().is_none());
    // A model that fits is not offloaded.
    let roomy =
        Request { devices: devices(1, Some(1 << 30)), host_memory: Some(1 << 30), ..request };
    assert!(plan(&roomy).unwrap().rows.iter().all(|row| row.at_host() == 0));
}

#[test]
fn an_update_in_the_backward_needs_no_gradients_on_the_host() {
    let profile = model(8);
    let [after, within] = [false, true].map(|update_in_backward| {
        let mut request = Request::new(&profile, devices(1, Some(66 * MIB)), 8);
        (request.optimizer_bytes, request.host_memory) = (2.0, Some(1 << 30));
        (request.micro_batches, request.update_in_backward) = (vec![8], update_in_backward);
        request.host_link = HostLinkCost::equal((4 * MIB) as f64);
        let best = plan(&request).unwrap().best().unwrap().clone();
        let step = PlannedStep::new(&request, &best).unwrap();
        assert_eq!(step.simulation.makespan(), best.makespan);
        best
    });
    assert!(after.at_host() > 0 && within.at_host() > 0);
    let each = |row: &PlanRow| row.host_bytes / row.at_host() as u64;
    assert_eq!((each(&after), each(&within)), (16 * MIB, 12 * MIB));
}

/// Sums of offloaded stages are always added after the backward, whatever the request says of devices.
#[test]
fn sums_are_apart_where_stages_live_on_the_host() {
    let profile = model(8);
    let [apart, at_once] = [true, false].map(|sums_apart| {
        let mut request = Request::new(&profile, devices(1, Some(40 * MIB)), 8);
        (request.sums_apart, request.host_memory) = (sums_apart, Some(1 << 30));
        (request.schedules, request.micro_batches) = (vec![Schedule::OneFOneB], vec![8]);
        let rows = plan(&request).unwrap().rows;
        let step = |row| PlannedStep::new(&request, row).unwrap().simulation.devices()[0];
        assert!(rows.iter().all(|row| step(row).peak_bytes == row.peak_bytes[0]));
        let (offloaded, resident): (Vec<_>, Vec<_>) =
            rows.iter().partition(|row| row.at_host() > 0);
        (offloaded[0].peak_bytes[0], resident[0].peak_bytes[0])
    });
    assert_eq!(apart.0, at_once.0);
    assert_eq!(apart.1 - at_once.1, 7 * 4 * MIB, "one layer's gradients at a time");
}

/// Eight layers with 4 MiB of parameters in half precision: sums are twice as large, and so are a
/// micro-batch's converted gradients, up to 64 MiB at a time, when of its activations only the output is
/// left. The gradients that sums are cast to at the end take less.
#[test]
fn sums_of_another_type_are_counted_as_they_are() {
    let profile = model(8);
    let peak = |gradient_bytes: f64| {
        let mut request = Request::new(&profile, devices(1, None), 8);
        request.gradient_bytes = gradient_bytes;
        request.schedules = vec![Schedule::OneFOneB];
        request.micro_batches = vec![8];
        plan(&request).unwrap().best().unwrap().peak_bytes[0]
    };
    let gone = 8 * MIB - MIB / 8;
    assert_eq!(peak(2.0) - peak(1.0), 8 * 4 * MIB + 64 * MIB - gone);
}

#[test]
fn questions_without_an_answer() {
    let profile = model(4);
    let ask = |change: fn(&mut Request<'_>)| {
        let mut request = Request::new(&profile, devices(2, None), 8);
        change(&mut request);
        plan(&request).unwrap_err().to_string()
    };
    assert_eq!(ask(|r| r.devices.clear()), "no devices to choose from: give at least one");
    assert_eq!(ask(|r| r.samples = 0), "no samples to choose from: give at least one");
    assert_eq!(
        ask(|r| r.micro_batches.push(0)),
        "the number of micro-batches is 0: a schedule needs at least 1"
    );
    assert!(
        ask(|r| r.gradient_bytes = -1.0)
            .starts_with("the number of gradient bytes per parameter byte is -1")
    );
    assert!(ask(|r| r.optimizer_bytes = f64::NAN).contains("NaN"));
    assert!(ask(|r| r.devices[1].speed = -1.0).starts_with("the speed of device 1 is -1"));
    assert!(ask(|r| r.link.bandwidth = -1.0).starts_with("the bandwidth of the link is -1"));
}

#[test]
fn json_has_the_promised_keys() {
    let profile = model(4);
    let plan = plan(&Request::new(&profile, devices(2, Some(1)), 4)).unwrap();
    let json = serde_json::to_value(&plan).unwrap();
    let row = json["rows"][0].as_object().unwrap();
    for key in [
        "schedule",
        "balance",
        "micro_batches",
        "recompute",
        "makespan",
        "bubble",
        "peak_bytes",
        "fits",
    ] {
        assert!(row.contains_key(key), "{key}");
    }
    assert_eq!(row["fits"], false);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_profile_panics(
        numbers in prop::collection::vec((any::<f64>(), any::<f64>(), any::<[u64; 3]>()), 0..8),
        count in 0usize..4, memory in any::<Option<u64>>(), samples in 0usize..40, positive in any::<bool>(),
    ) {
        let sign = |x: f64| if positive { x.abs() } else { x };
        let layers = numbers.into_iter().map(|(forward, backward, [a, b, c])| LayerCost {
            forward: sign(forward), backward: sign(backward),
            parameter_bytes: a, activation_bytes: b, output_bytes: c, ..LayerCost::default()
        });
        let profile = Profile { input_bytes: 1, layers: layers.collect() };
        if let Ok(plan) = plan(&Request::new(&profile, devices(count, memory), samples)) {
            prop_assert!(plan.rows.iter().all(|row| row.fits == row.misfits.is_empty()));
        }
    }
}
