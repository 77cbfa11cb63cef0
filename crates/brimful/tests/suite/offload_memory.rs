//! A step takes the device memory that its plan predicts: never more, and little less.

use std::sync::Mutex;

use brimful::balance::{self, LayerCost, Profile};
use brimful::internal::{gradient_factor, sums_apart};
use brimful::memory::Arena;
use brimful::optim::{AdamW, Method};
use brimful::plan::{PlanDevice, PlanRow, Request, plan};
use brimful::schedule::{Location, Recompute, Schedule};
use brimful::{DeviceSpec, Layers, Loss, Pipeline};

use crate::support::{Update, transformer};
use brimful_plan::plan::PlannedStage;
use brimful_plan::schedule::HostLinkCost;
use tch::{Device, Kind, Tensor, nn};

const RATE: f64 = 0.01;

/// Model, and a micro-batch of it.
struct Case {
    name: &'static str,
    layers: fn() -> Layers,
    input: fn(i64) -> Tensor,
    targets: fn(i64) -> Tensor,
    samples: i64,
}

const MLP: Case = Case {
    name: "mlp",
    layers: || {
        (0..6).fold(Layers::new(), |layers, number| {
            layers.add(format!("hidden{number}"), |p| {
                let linear = nn::linear(p, 192, 192, Default::default());
                nn::func(move |x: &Tensor| x.apply(&linear).tanh())
            })
        })
    },
    input: |n| Tensor::randn([n, 192], (Kind::Float, Device::Cpu)),
    targets: |n| Tensor::zeros([n], (Kind::Int64, Device::Cpu)),
    samples: 48,
};

fn block(p: &nn::Path) -> nn::Func<'static> {
    transformer::block(p, 96, 4)
}

/// Its head shares the embedding's table.
const GPT: Case = Case {
    name: "gpt",
    layers: || {
        let table = |p: &nn::Path| nn::embedding(p, 512, 96, Default::default());
        let layers = Layers::new().add("table", table);
        let layers =
            (0..6).fold(layers, |layers, number| layers.add(format!("block{number}"), block));
        layers.add_sharing("head", "table", |_, table| {
            let table = table
                .get("weight")
                .unwrap_or_else(|| table.var("weight", &[512, 96], nn::Init::Const(0.0)));
            nn::func(move |x: &Tensor| x.matmul(&table.tr()))
        })
    },
    input: |n| Tensor::randint(512, [n, 16], (Kind::Int64, Device::Cpu)),
    targets: |n| Tensor::randint(512, [n, 16], (Kind::Int64, Device::Cpu)),
    samples: 4,
};

const CONVOLUTIONS: Case = Case {
    name: "convolutions",
    layers: || {
        let layers = Layers::new().add("stem", |p| nn::conv2d(p, 3, 32, 3, pad()));
        let layers = (0..4).fold(layers, |layers, number| {
            layers.add(format!("block{number}"), |p| {
                let (one, two) = (
                    nn::conv2d(p / "one", 32, 32, 3, pad()),
                    nn::conv2d(p / "two", 32, 32, 3, pad()),
                );
                nn::func(move |x: &Tensor| (x + x.apply(&one).relu().apply(&two)).relu())
            })
        });
        layers.add("head", |p| {
            let linear = nn::linear(p, 32, 10, Default::default());
            nn::func(move |x: &Tensor| {
                x.mean_dim([2_i64, 3].as_slice(), false, None).apply(&linear)
            })
        })
    },
    input: |n| Tensor::randn([n, 3, 16, 16], (Kind::Float, Device::Cpu)),
    targets: |n| Tensor::zeros([n], (Kind::Int64, Device::Cpu)),
    samples: 4,
};

fn pad() -> nn::ConvConfig {
    nn::ConvConfig { padding: 1, ..Default::default() }
}

fn loss(out: &Tensor, targets: &Tensor) -> Tensor {
    let classes = *out.size().last().expect("a size");
    out.view([-1, classes]).cross_entropy_for_logits(&targets.view([-1]))
}

impl Case {
    fn typed(&self, n: i64, kind: Kind) -> Tensor {
        let input = (self.input)(n);
        if input.is_floating_point() { input.to_kind(kind) } else { input }
    }

    /// Measures its layers, the last one with the loss.
    fn profile(&self, kind: Kind) -> Profile {
        let targets = Mutex::new((self.targets)(self.samples));
        let layers = (self.layers)().add_fn("loss", move |out| {
            loss(out, &targets.lock().expect("targets").narrow(0, 0, out.size()[0]))
        });
        let input = self.typed(self.samples, kind);
        let mut profile = balance::measure_of_kind(&layers, Device::Cpu, &input, kind, |_| {})
            .expect("a profile");
        let loss = profile.layers.pop().expect("a loss");
        let last = profile.layers.pop().expect("a layer");
        profile.layers.push(last.with_loss(&loss));
        // Fixed times, so that a plan does not depend on the machine.
        let timed = |layer: LayerCost| LayerCost {
            forward: 1e-4,
            backward: 2e-4,
            input_gradient: None,
            weight_gradient: None,
            overhead: 0.0,
            ..layer
        };
        // A mini-batch on a CPU is borrowed: it takes no memory of the device's arena.
        Profile { input_bytes: 0, layers: profile.layers.into_iter().map(timed).collect() }
    }

    /// Returns the device's peak bytes in two training steps.
    fn peak(&self, row: &PlanRow, kind: Kind, m: i64) -> u64 {
        let (device, host) = (Arena::new("device"), Arena::new("host"));
        let mut pipe = Pipeline::builder((self.layers)())
            .devices([DeviceSpec::cpu().threads(1).arena(device.clone())])
            .host(host)
            .kind(kind)
            .plan(row)
            .build()
            .expect("a pipeline");
        // Offloaded stages are first built on the device.
        device.reset_peak();
        let mut optimizer = pipe.optimizer(AdamW::new(RATE)).expect("an optimizer");
        let samples = m * self.samples;
        let (x, y) = (self.typed(samples, kind), (self.targets)(samples));
        for _ in 0..2 {
            let mean = |out: Tensor, y: &Tensor| Loss::mean(loss(&out, y));
            pipe.backward(&x, &y, mean).expect("a step");
            optimizer.update();
        }
        device.peak()
    }

    /// Plans everything on the device, without a memory limit.
    fn request<'a>(&self, profile: &'a Profile, kind: Kind, m: i64) -> Request<'a> {
        let method: Method = AdamW::new(RATE).into();
        Request {
            gradient_bytes: gradient_factor(kind),
            sums_apart: sums_apart(Device::Cpu, kind),
            optimizer_bytes: method.state_factor_in(kind),
            micro_batches: vec![m as usize],
            schedules: vec![Schedule::OneFOneB],
            recompute: Some(Recompute::Never),
            // So slow that transfers determine the step's time.
            host_link: HostLinkCost::equal(1e6),
            ..Request::new(profile, vec![PlanDevice::default()], (m * self.samples) as usize)
        }
    }
}

/// Plans with this much device memory, and offloads what does not fit.
fn within(request: &Request<'_>, memory: u64) -> Option<PlanRow> {
    let devices = vec![PlanDevice { memory: Some(memory), ..PlanDevice::default() }];
    let host_memory = Some(1 << 40);
    let limited = Request { devices, host_memory, ..request.clone() };
    plan(&limited).expect("a plan").best().cloned()
}

/// The step takes at most the planned memory, apart from single numbers such as the loss and the alignment of
/// tensors in device buffers, and at least eight tenths of it: the workspace of a bf16 convolution differs between CPUs.
#[track_caller]
fn assert_planned(taken: u64, row: &PlanRow, what: &str) {
    const SINGLE_NUMBERS: u64 = 4096;
    let (planned, ratio) = (row.peak_bytes[0], taken as f64 / row.peak_bytes[0] as f64);
    assert!(taken <= planned + SINGLE_NUMBERS, "{what}: {taken} of {planned} bytes");
    assert!(ratio >= 0.8, "{what}: {taken} of {planned} bytes");
}

#[test]
fn a_step_takes_what_was_planned() {
    for (case, kind) in [MLP, GPT, CONVOLUTIONS]
        .iter()
        .flat_map(|case| [Kind::Float, Kind::BFloat16].map(|kind| (case, kind)))
    {
        let profile = case.profile(kind);
        for m in [1, 4] {
            let what = format!("{} in {kind:?}, m = {m}", case.name);
            let request = case.request(&profile, kind, m);
            let resident = plan(&request).expect("a plan").best().expect("no limit").clone();
            // With one micro-batch, the sums grow while its activations shrink, all in one action.
            if m > 1 {
                assert_planned(
                    case.peak(&resident, kind, m),
                    &resident,
                    &format!("{what}, resident"),
                );
            }
            for share in [30, 45, 60, 80, 95] {
                let row = within(&request, resident.peak_bytes[0] / 100 * share);
                if let Some(row) = row {
                    assert_planned(case.peak(&row, kind, m), &row, &format!("{what}, {share} %"));
                }
            }
        }
    }
}

/// As many stages stay on the device as the best choice leaves there in real steps.
#[test]
fn as_many_stages_stay_as_real_steps_have_memory_for() {
    let (kind, m) = (Kind::Float, 4);
    // So few samples that activations between stages are negligible beside the weights.
    let case = Case { samples: 2, ..MLP };
    let profile = case.profile(kind);
    let request = case.request(&profile, kind, m);
    let all = plan(&request).expect("a plan").best().expect("no limit").peak_bytes[0];
    let planned = within(&request, all / 2).expect("a plan with homes");
    let s = planned.stages.len();
    // Least memory of real steps with one device buffer, by the number of resident stages.
    let mut least = vec![u64::MAX; s + 1];
    for number in 0..1 << s {
        for boundaries in [Location::Device, Location::Host] {
            let weights =
                |j: usize| if number >> j & 1 == 1 { Location::Device } else { Location::Host };
            let stage =
                |j| PlannedStage { weights: weights(j), boundaries, recompute: Recompute::Always };
            let stages: Vec<_> = (0..s).map(stage).collect();
            let row = PlanRow { stages, device_buffers: 1, ..planned.clone() };
            let stay = s - row.at_host();
            least[stay] = least[stay].min(case.peak(&row, kind, m));
        }
    }
    // A twentieth more, for memory that is planned but not taken.
    for (stay, taken) in least.into_iter().enumerate() {
        let row = within(&request, taken + taken / 20).expect("a plan");
        assert!(s - row.at_host() >= stay, "{} of {stay} stay in {taken} bytes", s - row.at_host());
    }
}
