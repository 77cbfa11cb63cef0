//! Tiny models for the pipeline's tests, each with a batch and a loss, and the plain model that pipelines are
//! compared with.

use std::ops::Range;

use brimful::layers::Model;
use brimful::nn::batch_norm2d;
use brimful::optim::{Adam, Optimizer};
use brimful::pipeline::Builder;
use brimful::schedule::Schedule;
use brimful::{Batch, DeviceSpec, Layers, Loss, MicroBatcher, MicroBatches, Pipeline, StepRng};
use brimful_plan::split;
use tch::nn::{self, ModuleT, Path, VarStore};
use tch::{Device, Kind, Tensor};

use super::{Named, gradients, set_values, test_device, variables};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Model, its data, and whether the micro-batch size affects its results.
pub struct Case {
    pub name: &'static str,
    pub layers: fn() -> Layers,
    pub input: fn(i64) -> Tensor,
    pub target: fn(i64) -> Tensor,
    pub loss: fn(Tensor, &Tensor) -> Loss,
    pub shows_cut: bool,
}

pub const MLP: Case = Case {
    name: "mlp",
    layers: mlp,
    input: |n| Tensor::randn([n, 4], DOUBLE),
    target: classes,
    loss: cross_entropy,
    shows_cut: false,
};

/// With deferred BatchNorm.
pub const CNN: Case = Case {
    name: "cnn",
    layers: cnn,
    input: |n| Tensor::randn([n, 2, 6, 6], DOUBLE),
    target: classes,
    loss: cross_entropy,
    shows_cut: true,
};

/// With skips across stages, one of them popped twice.
pub const U_NET: Case = Case {
    name: "u-net",
    layers: u_net,
    input: |n| Tensor::randn([n, 2, 8, 8], DOUBLE),
    target: |n| Tensor::randn([n, 1, 8, 8], DOUBLE),
    loss: |out: Tensor, y| Loss::mean(out.mse_loss(y, tch::Reduction::Mean)),
    shows_cut: false,
};

/// With a shared table and dropout, and a loss over tokens that are not padding.
pub const GPT: Case = Case {
    name: "gpt",
    layers: gpt,
    input: |n| Tensor::randint(VOCABULARY, [n, SEQUENCE], (Kind::Int64, Device::Cpu)),
    target: |n| Tensor::randint(VOCABULARY, [n, SEQUENCE], (Kind::Int64, Device::Cpu)),
    loss: token_loss,
    shows_cut: true,
};

pub const CASES: [Case; 4] = [MLP, CNN, U_NET, GPT];

pub const INTERLEAVED: Schedule = Schedule::Interleaved { stages_per_device: 2 };

const VOCABULARY: i64 = 11;
const SEQUENCE: i64 = 5;
const WIDTH: i64 = 6;

pub fn linear(inputs: i64, outputs: i64) -> impl Fn(&Path) -> nn::Linear + Send + Sync {
    move |p| nn::linear(p, inputs, outputs, Default::default())
}

/// No bias: before a BatchNorm its gradient is pure rounding, which Adam would amplify.
fn conv(from: i64, to: i64) -> impl Fn(&Path) -> nn::Conv2D + Send + Sync {
    let config = nn::ConvConfig { padding: 1, bias: false, ..Default::default() };
    move |p| nn::conv2d(p, from, to, 3, config)
}

pub fn mlp() -> Layers {
    Layers::new()
        .add("fc1", linear(4, 6))
        .add_fn("tanh1", |x| x.tanh())
        .add("fc2", linear(6, 6))
        .add_fn("tanh2", |x| x.tanh())
        .add("fc3", linear(6, 6))
        .add_fn("relu3", |x| x.relu())
        .add("fc4", linear(6, 5))
        .add("fc5", linear(5, 3))
}

fn cnn() -> Layers {
    Layers::new()
        .add("conv1", conv(2, 3))
        .add("bn1", |p| batch_norm2d(p, 3, Default::default()))
        .add_fn("relu1", |x| x.relu())
        .add("conv2", conv(3, 4))
        .add("bn2", |p| batch_norm2d(p, 4, Default::default()))
        .add_fn("relu2", |x| x.relu())
        .add_fn("flat", |x| x.flatten(1, -1))
        .add("fc", linear(4 * 36, 3))
}

/// One level: the downward value is popped on the way up; both levels call it `skip`.
fn level(channels: i64, size: i64, inner: Layers) -> Layers {
    Layers::new()
        .add("in", conv(channels, channels))
        .stash("skip")
        .add_fn("down", |x| x.max_pool2d_default(2))
        .add_layers("inner", inner)
        .add_fn("up", move |x| x.upsample_nearest2d([size, size], None, None))
        .pop("join", "skip", |x, skip| Tensor::cat(&[x, skip], 1))
        .add("out", conv(2 * channels, channels))
        .pop("again", "skip", |x, skip| x + skip.tanh())
}

fn u_net() -> Layers {
    let bottom = Layers::new().add("conv", conv(2, 2)).add_fn("tanh", |x| x.tanh());
    Layers::new()
        .add_layers("net", level(2, 8, level(2, 4, bottom)))
        .add("head", |p| nn::conv2d(p, 2, 1, 1, Default::default()))
}

fn table(p: &Path) -> Tensor {
    p.get("weight").unwrap_or_else(|| p.randn("weight", &[VOCABULARY, WIDTH], 0.0, 0.5))
}

fn gpt() -> Layers {
    let block = || {
        Layers::new()
            .stash("residual")
            .add("norm", |p| nn::layer_norm(p, vec![WIDTH], Default::default()))
            .add("mix", linear(WIDTH, WIDTH))
            .add_fn("gelu", |x| x.gelu("none"))
            .add_fn_t("drop", |x, train| x.dropout(0.3, train))
            .pop("sum", "residual", |x, residual| x + residual)
    };
    Layers::new()
        .add("wte", |p| {
            let table = table(p);
            nn::func(move |x| Tensor::embedding(&table, x, -1, false, false))
        })
        .add_fn_t("drop", |x, train| x.dropout(0.2, train))
        .add_layers("h0", block())
        .add_layers("h1", block())
        .add_sharing("head", "wte", |_, p| {
            let table = table(p);
            nn::func(move |x| x.linear(&table, None::<Tensor>))
        })
}

fn classes(n: i64) -> Tensor {
    Tensor::randint(3, [n], (Kind::Int64, Device::Cpu))
}

fn cross_entropy(out: Tensor, y: &Tensor) -> Loss {
    Loss::mean(out.cross_entropy_loss::<Tensor>(y, None, tch::Reduction::Mean, -100, 0.0))
}

/// Mean over all tokens but number 0, and a term on the outputs.
fn token_loss(out: Tensor, y: &Tensor) -> Loss {
    let rows = out.view([-1, VOCABULARY]);
    let sum = rows.cross_entropy_loss::<Tensor>(&y.view([-1]), None, tch::Reduction::Sum, 0, 0.0);
    Loss::ratio(sum, y.ne(0).sum(Kind::Double)) + Loss::mean(out.square().mean(Kind::Double)) * 0.1
}

/// Builds a pipeline in f64 on the tested device, with one thread for each worker.
pub fn builder(layers: Layers, devices: usize) -> Builder {
    let device = |_| DeviceSpec::from(test_device()).threads(1);
    Pipeline::builder(layers).devices((0..devices).map(device)).kind(Kind::Double)
}

/// Builds such a pipeline, which cuts a mini-batch into this many micro-batches.
pub fn piped(layers: Layers, devices: usize, micro_batches: usize) -> Pipeline {
    let builder = builder(layers, devices).micro_batches(MicroBatches::Count(micro_batches));
    builder.build().expect("a pipeline")
}

/// Returns the model's outputs for a batch cut with its own size.
pub fn eval(pipe: &mut Pipeline, x: &impl Batch, size: MicroBatches) -> brimful::Result<Tensor> {
    let before = pipe.micro_batches();
    pipe.set_micro_batches(size);
    let outputs = pipe.map(x, |out: Tensor| out);
    pipe.set_micro_batches(before);
    outputs
}

/// Distribution of a mini-batch over replicas and micro-batches.
#[derive(Clone, Copy)]
pub struct Cut {
    pub samples: usize,
    pub replicas: usize,
    /// Micro-batches of each replica.
    pub micro_batches: usize,
}

/// Samples that the plain model runs together, and their random numbers.
#[derive(Debug, Clone)]
pub struct Piece {
    pub rows: Range<usize>,
    pub rng: StepRng,
}

/// Returns the seed that a step would draw.
pub fn drawn_seed() -> u64 {
    Tensor::randint(i64::MAX, [1], (Kind::Int64, Device::Cpu)).int64_value(&[0]).unsigned_abs()
}

impl Case {
    /// Returns the mini-batch with this number, the same each time, and fixes the seed of the next step.
    pub fn data(&self, samples: usize, number: i64) -> (Tensor, Tensor) {
        tch::manual_seed(100 + number);
        ((self.input)(samples as i64), (self.target)(samples as i64))
    }

    /// Returns the loss as a closure that also returns the outputs.
    pub fn loss_and_outputs(&self) -> impl Fn(Tensor, &Tensor) -> (Loss, Tensor) + Send + use<> {
        let loss = self.loss;
        move |out, y| {
            let given = out.detach();
            (loss(out, y), given)
        }
    }

    /// Returns a mini-batch as replicas run it: one piece if the micro-batch size does not affect the results.
    pub fn pieces(&self, cut: Cut, seed: Option<u64>) -> Vec<Piece> {
        let Cut { samples, replicas, micro_batches } = cut;
        let seed = seed.expect("a pipeline's step has a seed");
        if !self.shows_cut {
            return vec![Piece { rows: 0..samples, rng: StepRng::new(seed, 0) }];
        }
        let shares = split::by_count(samples, replicas).expect("samples").into_iter();
        let cut = shares.flat_map(|share| {
            let ranges = split::by_count(share.len(), micro_batches).expect("samples").into_iter();
            ranges.map(move |range| share.start + range.start..share.start + range.end)
        });
        let number = |(i, rows)| Piece { rows, rng: StepRng::new(seed, i) };
        cut.enumerate().map(number).collect()
    }
}

/// Plain model with a pipeline's values, trained by its own optimizer.
pub struct Plain {
    pub store: VarStore,
    pub model: Model,
    pub optimizer: Optimizer,
}

impl Plain {
    pub fn of(layers: &Layers, pipe: &Pipeline) -> Self {
        Self::with(layers, pipe.variables().expect("variables"))
    }

    pub fn with(layers: &Layers, values: Named) -> Self {
        Self::on((Kind::Double, test_device()), layers, values)
    }

    pub fn on((kind, device): (Kind, Device), layers: &Layers, values: Named) -> Self {
        let mut store = VarStore::new(device);
        let model = layers.build(&store.root()).expect("built");
        store.set_kind(kind);
        set_values(&store, &values);
        let optimizer = Optimizer::new(&store, Adam::new(0.01)).expect("an optimizer");
        Self { store, model, optimizer }
    }

    /// Returns the loss, and computes gradients over these micro-batches, with the random numbers of a step with
    /// this seed.
    pub fn backward(
        &self,
        case: &Case,
        x: &Tensor,
        y: &Tensor,
        size: MicroBatches,
        seed: Option<u64>,
    ) -> f64 {
        let MicroBatches::Count(micro_batches) = size else {
            panic!("{size:?} is cut as it comes")
        };
        let cut = Cut { samples: x.size()[0] as usize, replicas: 1, micro_batches };
        self.backward_pieces(case, x, y, &case.pieces(cut, seed.or(Some(0))))
    }

    /// Returns the loss, and computes gradients of a mini-batch whose pieces run separately and count as one.
    ///
    /// To the batcher it is one micro-batch, so no code for sums is shared with the compared pipeline.
    pub fn backward_pieces(&self, case: &Case, x: &Tensor, y: &Tensor, pieces: &[Piece]) -> f64 {
        let mut micro = MicroBatcher::new(&self.store, MicroBatches::Count(1));
        let batch = (x.shallow_clone(), y.shallow_clone());
        let step = micro.backward(&batch, |(x, y)| (case.loss)(self.outputs(&x, pieces), &y));
        step.expect("a plain step").loss
    }

    /// Returns the outputs of a mini-batch whose pieces run separately.
    fn outputs(&self, x: &Tensor, pieces: &[Piece]) -> Tensor {
        let run = |Piece { rows, rng }: &Piece| {
            let x = x.narrow(0, rows.start as i64, rows.len() as i64);
            self.model.forward_with_rng(&[x], true, *rng).swap_remove(0)
        };
        Tensor::cat(&pieces.iter().map(run).collect::<Vec<_>>(), 0)
    }

    pub fn values(&self) -> Named {
        variables(&self.store)
    }

    pub fn gradients(&self) -> Named {
        gradients(&self.store)
    }

    /// Returns its outputs in an evaluation.
    pub fn answer(&self, x: &Tensor) -> Tensor {
        tch::no_grad(|| self.model.forward_t(&x.to_device(test_device()), false))
    }
}

/// Loss that needs all rows at once.
pub fn of_all(out: &Tensor) -> Tensor {
    let rows = out.flatten(1, -1);
    rows.matmul(&rows.tr()).logsumexp([0], false).sum(Kind::Double)
}

/// Builds a pipeline with the same initial values each time.
pub fn built(builder: Builder, what: &str) -> Pipeline {
    tch::manual_seed(7);
    builder.build().unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Runs a user-defined optimizer's step on all variables that have a gradient.
pub fn descend(values: Named) {
    tch::no_grad(|| {
        for (_, mut value) in values.into_iter().filter(|(_, value)| value.grad().defined()) {
            let gradient = value.grad();
            let _itself = value.f_sub_(&(gradient * 0.5)).expect("a step");
        }
    });
}
