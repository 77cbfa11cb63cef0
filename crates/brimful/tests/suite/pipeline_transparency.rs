//! A pipelined step is the plain model's step: outputs, loss, gradients, and parameters after three steps of
//! Adam, for every schedule and number of devices, in one pipeline and in two. Recompute modes and cuts take turns, so
//! that each meets each schedule; `differential` draws all their combinations.

use crate::support::pipeline_cases::{
    CNN, Case, GPT, INTERLEAVED, LSTM, MLP, Plain, PlainRun, U_NET, builder, built,
};
use crate::support::{alone, assert_same, assert_within, test_device, tests};
use brimful::pipeline::Offload;
use brimful::schedule::{Location, Recompute, Schedule};
use brimful::{DeviceSpec, Layers, Loss, MicroBatches};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Reduction, Tensor};

fn every_schedule(case: &Case) {
    let _turn = alone();
    // The first, on a pipeline that has not run yet, is ragged: 13 samples.
    let references = PlainRun::of_cuts(case, 1, &[(13, 4), (8, 1), (9, 3), (8, 8)]);
    let others = references.len() - 1;
    for devices in 1..=4 {
        for (place, schedule) in Schedule::all(2).into_iter().enumerate() {
            if (case.layers)().len() < devices * schedule.stages_per_device() {
                continue;
            }
            let recompute = Recompute::ALL[(place + devices) % Recompute::ALL.len()];
            let what = format!("{}, {devices} devices, {schedule}, {recompute}", case.name);
            let builder = builder((case.layers)(), devices);
            let mut pipe = built(builder.schedule(schedule).recompute(recompute), &what);
            let values = pipe.variables().expect("variables");
            assert_same(&what, &values, &references[0].first);
            references[0].compare(&mut pipe, &what);
            references[1 + (place + 2 * devices) % others].compare(&mut pipe, &what);
        }
    }
}

/// Offloads some or all stages, in every order that has a worker for them. The first recompute mode depends on the turn.
fn on_host(case: &Case, turn: usize) {
    let _turn = alone();
    let references = PlainRun::of_cuts(case, 1, &[(13, 4), (8, 1), (8, 4)]);
    let of = |devices: usize, stages_per_device: usize, offload: Offload| {
        (devices, Schedule::BreadthFirst { stages_per_device }, offload)
    };
    let every_other = [Location::Host, Location::Device, Location::Host].into();
    let mut cases = vec![of(1, 1, Offload::Host), of(1, 3, Offload::Host), of(1, 8, Offload::Host)];
    cases.extend([of(1, 3, every_other), of(2, 2, Offload::Host)]);
    cases.push((2, Schedule::OneFOneB, Offload::Host));
    cases.push((2, Schedule::OneFOneB, [Location::Device, Location::Host].into()));
    cases.push((2, Schedule::ZeroBubbleH1, Offload::Host));
    cases.push((1, Schedule::ZeroBubbleV, Offload::Host));
    for (place, (devices, schedule, locations)) in cases.into_iter().enumerate() {
        let recompute = Recompute::ALL[(place + turn) % Recompute::ALL.len()];
        let what =
            format!("{}, {devices} devices, {schedule}, {locations:?}, {recompute}", case.name);
        let builder = builder((case.layers)(), devices).schedule(schedule);
        let mut pipe = built(builder.offload(locations).recompute(recompute), &what);
        references[0].compare(&mut pipe, &what);
        references[1 + place % 2].compare(&mut pipe, &what);
    }
}

/// Gives each pipeline its part of every mini-batch.
fn two_pipelines(case: &Case) {
    let _turn = alone();
    // Ragged, even, one sample per micro-batch, and fewer samples than pipelines.
    let references = PlainRun::of_cuts(case, 2, &[(13, 3), (8, 2), (3, 4), (1, 2)]);
    for (schedule, recompute) in [
        (Schedule::GPipe, Recompute::Never),
        (Schedule::OneFOneB, Recompute::ExceptLast),
        (INTERLEAVED, Recompute::Always),
    ] {
        let what = format!("{}, two of {schedule}, {recompute}", case.name);
        let builder = builder((case.layers)(), 4).replicas(2);
        let mut pipe = built(builder.schedule(schedule).recompute(recompute), &what);
        assert_eq!(pipe.devices().len(), 4, "{what}");
        let stages = pipe.balance().sizes().len();
        assert_eq!(stages, 2 * schedule.stages_per_device(), "{what}");
        references.iter().for_each(|reference| reference.compare(&mut pipe, &what));
    }
}

fn each(out: &Tensor, y: &Tensor) -> Tensor {
    out.cross_entropy_loss::<Tensor>(y, None, Reduction::None, -100, 0.0)
}

fn class_weights(out: &Tensor) -> Tensor {
    Tensor::from_slice(&[0.5, 1.0, 3.0]).to_kind(out.kind()).to_device(out.device())
}

fn weighted(out: &Tensor, y: &Tensor) -> Tensor {
    out.cross_entropy_loss(y, Some(class_weights(out)), Reduction::Mean, -100, 0.0)
}

/// Name of a loss, the loss of a micro-batch, and that of the whole mini-batch.
type NamedLoss = (&'static str, fn(Tensor, &Tensor) -> Loss, fn(&Tensor, &Tensor) -> Tensor);

const LOSSES: [NamedLoss; 4] = [
    ("mean", |out, y| Loss::mean(each(&out, y).mean(None)), |out, y| each(out, y).mean(None)),
    ("sum", |out, y| Loss::sum(each(&out, y).sum(None)), |out, y| each(out, y).sum(None)),
    (
        "class weights",
        |out, y| {
            let weight = class_weights(&out).index_select(0, y).sum(None);
            Loss::mean_over(weighted(&out, y), weight)
        },
        weighted,
    ),
    (
        "two terms",
        |out, y| {
            Loss::mean(each(&out, y).mean(None)) * 2.0 + Loss::sum(out.square().sum(None)) * 0.1
        },
        |out, y| each(out, y).mean(None) * 2.0 + out.square().sum(None) * 0.1,
    ),
];

/// Covers kinds of losses and dtypes, from one sample on.
#[test]
fn every_loss_and_kind_of_number() {
    let _turn = alone();
    for (kind, tolerance) in [(Kind::Double, 1e-10), (Kind::Float, 1e-4)] {
        for (name, loss, whole) in LOSSES {
            let schedules = [Schedule::OneFOneB, Schedule::ZeroBubbleH1];
            let cuts = [(1, 1), (1, 4), (3, 8), (13, 4)];
            for (schedule, (samples, m)) in schedules.into_iter().flat_map(|s| cuts.map(|c| (s, c)))
            {
                let what = format!("{name}, {schedule}, {kind:?}, {samples}/{m}");
                let builder =
                    builder((MLP.layers)(), 3).kind(kind).micro_batches(MicroBatches::Count(m));
                let mut pipe = built(builder.schedule(schedule), &what);
                let plain = Plain::of(&(MLP.layers)(), &pipe);
                let (x, y) = MLP.data(samples, 0);
                let x = x.to_kind(kind);
                let step = pipe.backward(&x, &y, loss);
                let step = step.unwrap_or_else(|error| panic!("{what}: {error}"));
                let (x, y) = (x.to_device(test_device()), y.to_device(test_device()));
                let expected = whole(&plain.model.forward_t(&x.to_kind(Kind::Double), true), &y);
                expected.backward();
                let off = (step.loss - expected.double_value(&[])).abs();
                assert!(off < tolerance, "{what}: the loss is off by {off}");
                let gradients = pipe.gradients().expect("gradients");
                assert_within(&gradients, &plain.gradients(), tolerance, &what);
            }
        }
    }
}

/// bf16 has 8 bits: from 256 to 512 it has the even numbers alone. So a gradient of 257 and more is 258 if it is
/// rounded once, after all pipelines and all stages that have the weight are added up, and 256 if each of them rounds
/// its own.
#[test]
fn gradients_in_half_precision_are_rounded_once_over_replicas_and_tied_stages() {
    let _turn = alone();
    let weight = |p: &nn::Path| p.get("weight").unwrap_or_else(|| p.ones("weight", &[1]));
    let times = move |p: &nn::Path| {
        let weight = weight(p);
        nn::func(move |x| x * &weight)
    };
    let plus = move |_: &nn::Path, p: &nn::Path| {
        let weight = weight(p);
        nn::func(move |x| x + &weight * 0.4375)
    };
    let one = || Layers::new().add("one", times);
    let two = || one().add_sharing("two", "one", plus);
    let cases = [
        ("two pipelines", builder(one(), 2).replicas(2), vec![256.0, 0.9375, 0.9375, 0.0]),
        ("tied stages", builder(two(), 2), vec![256.0, 0.4375]),
        ("both", builder(two(), 4).replicas(2), vec![256.0, 0.0, 0.0, 0.0]),
    ];
    for (what, builder, x) in cases {
        let builder = builder.kind(Kind::BFloat16).micro_batches(MicroBatches::Samples(1));
        let mut pipe = built(builder, what);
        let x = Tensor::from_slice(&x).to_kind(Kind::BFloat16).unsqueeze(1);
        pipe.backward(&x, &x, |out: Tensor, _: &Tensor| Loss::sum(out.sum(None))).expect("a step");
        let gradients = pipe.gradients().expect("gradients");
        assert_eq!((gradients.len(), gradients[0].1.kind()), (1, Kind::BFloat16), "{what}");
        assert_eq!(gradients[0].1.double_value(&[0]), 258.0, "{what}");
    }
}

tests! {
    mlp => every_schedule(&MLP),
    cnn_with_deferred_batch_norm => every_schedule(&CNN),
    u_net_with_skips_across_stages => every_schedule(&U_NET),
    gpt_with_a_shared_table_and_dropout => every_schedule(&GPT),
    lstm_whose_weights_are_used_at_every_step_of_a_sequence => every_schedule(&LSTM),
    mlp_offloaded => on_host(&MLP, 0),
    cnn_offloaded_with_deferred_batch_norm => on_host(&CNN, 1),
    u_net_offloaded_with_skips_across_stages => on_host(&U_NET, 2),
    gpt_offloaded_with_a_shared_table_and_dropout => on_host(&GPT, 1),
    mlp_in_two_pipelines => two_pipelines(&MLP),
    cnn_with_deferred_batch_norm_in_two_pipelines => two_pipelines(&CNN),
    u_net_with_skips_in_two_pipelines => two_pipelines(&U_NET),
    gpt_with_a_shared_table_and_dropout_in_two_pipelines => two_pipelines(&GPT),
}

/// If the tested device is not a CPU, every boundary and skip crosses devices here.
#[test]
fn a_mix_of_devices() {
    let _turn = alone();
    for case in [&MLP, &CNN, &U_NET] {
        let references = PlainRun::of_cuts(case, 1, &[(9, 4)]);
        for recompute in Recompute::ALL {
            let devices = [test_device(), Device::Cpu, test_device(), Device::Cpu];
            let what = format!("{}, {recompute}, a mix", case.name);
            let devices = devices.map(|device| DeviceSpec::from(device).threads(1));
            let builder = builder((case.layers)(), 0).devices(devices).recompute(recompute);
            references[0].compare(&mut built(builder, &what), &what);
        }
    }
}
