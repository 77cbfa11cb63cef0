//! References for engines: small models, samples, losses, and the plain model on the whole mini-batch.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use brimful::layers::Model;
use brimful::nn::{BatchNorm, BatchNormConfig, BatchNormPolicy, batch_norm1d};
use brimful::{Layers, Loss, MicroBatcher, MicroBatches, StepRng, World};
use brimful_plan::split;
use brimful_torch::random::{generator_state, set_generator_state};
use tch::nn::{self, ModuleT, Path, VarStore};
use tch::{Device, Kind, Tensor};

use crate::kinds::{Drawing, Engine, LossFn, Make, MakeLayers, Samples, Setup, Target, WholeLoss};
use crate::support::pipeline_cases::linear;
use crate::support::{Named, clear, copies, gradients, numbers, variables};

/// Seed of the first rank's generator before every compared step.
const SEED: i64 = 5;

/// Model, and whether the micro-batch size affects its results.
#[derive(Clone, Copy)]
pub struct Net {
    pub name: &'static str,
    pub layers: MakeLayers,
    pub shows_cut: bool,
}

/// Samples do not influence each other.
pub const PLAIN: Net = Net { name: "plain", layers: plain, shows_cut: false };
/// With BatchNorm.
pub const NORMED: Net = Net { name: "normed", layers: normed, shows_cut: true };
/// With BatchNorm and dropout.
pub const DROPPED: Net = Net { name: "dropped", layers: dropped, shows_cut: true };
/// With norms whose statistics move at the commit, at every micro-batch, and as tch moves its own; and dropout. For
/// comparisons of an engine with itself.
pub const MOVED: Net = Net { name: "moved", layers: moved, shows_cut: true };

fn norm(policy: BatchNormPolicy) -> impl Fn(&Path) -> BatchNorm + Send + Sync {
    move |p| batch_norm1d(p, 6, BatchNormConfig { policy, ..Default::default() })
}

thread_local! {
    /// Pieces of a mini-batch that runs whole, and the random numbers of each; otherwise empty.
    static PIECES: RefCell<Vec<(i64, StepRng)>> = const { RefCell::new(Vec::new()) };
}

/// Dropout, the layer at this position. Each piece of a whole mini-batch draws its own numbers.
fn drop_at(position: usize) -> impl Fn(&Tensor, bool) -> Tensor + Send + Sync {
    move |x, train| {
        let pieces = PIECES.with_borrow(Vec::clone);
        if pieces.is_empty() {
            return x.dropout(0.3, train);
        }
        let sizes: Vec<i64> = pieces.iter().map(|(size, _)| *size).collect();
        let dropped =
            x.split_with_sizes(&sizes[..], 0).into_iter().zip(pieces).map(|(x, (_, draws))| {
                tch::manual_seed(draws.seed(position) as i64);
                x.dropout(0.3, train)
            });
        Tensor::cat(&dropped.collect::<Vec<_>>(), 0)
    }
}

fn plain(_: BatchNormPolicy) -> Layers {
    Layers::new()
        .add("in", linear(4, 6))
        .add_fn("tanh", |x| x.tanh())
        .add("mid", linear(6, 6))
        .add("out", linear(6, 3))
}

fn normed(policy: BatchNormPolicy) -> Layers {
    Layers::new()
        .add("in", linear(4, 6))
        .add_norm("norm", norm(policy))
        .add("mid", linear(6, 6))
        .add_norm("last norm", norm(policy))
        .add("out", linear(6, 3))
}

fn dropped(policy: BatchNormPolicy) -> Layers {
    Layers::new()
        .add("in", linear(4, 6))
        .add_norm("norm", norm(policy))
        .add_fn_t("drop", drop_at(2))
        .add("mid", linear(6, 6))
        .add_fn_t("drop again", drop_at(4))
        .add("out", linear(6, 3))
}

fn moved(policy: BatchNormPolicy) -> Layers {
    Layers::new()
        .add("in", linear(4, 6))
        .add_norm("norm", norm(policy))
        .add_fn_t("drop", drop_at(2))
        .add("mid", linear(6, 6))
        .add("norm at once", norm(BatchNormPolicy::PerMicroBatch))
        .add("norm of tch", |p| nn::batch_norm1d(p, 6, Default::default()))
        .add("out", linear(6, 3))
}

pub fn samples(count: i64, seed: i64) -> Samples {
    let tokens = (numbers(&[count], seed + 2) * 1e4).remainder(8.0).floor() + 1.0;
    let number = Tensor::arange(count, (Kind::Int64, Device::Cpu));
    (numbers(&[count, 4], seed), (numbers(&[count, 3], seed + 1), tokens, number))
}

/// Loss, as terms of the full batch and as a sum over micro-batches.
pub struct Case {
    pub name: &'static str,
    pub full: fn(&Tensor, &Target) -> Vec<Tensor>,
    pub micro: fn(&Tensor, &Target) -> Loss,
}

impl Case {
    pub fn loss(&self) -> LossFn {
        let micro = self.micro;
        Arc::new(move |out, target| Ok(micro(out, target)))
    }
}

fn errors(out: &Tensor, (y, ..): &Target) -> Tensor {
    (out - y).square().mean_dim(1, false, Kind::Double)
}

fn over_tokens(out: &Tensor, target: &Target) -> (Tensor, Tensor) {
    let tokens = &target.1;
    ((errors(out, target) * tokens).sum(Kind::Double), tokens.sum(Kind::Double))
}

fn squares(out: &Tensor) -> Tensor {
    out.square().sum(Kind::Double)
}

/// Term that counts once: that of the first micro-batch's first sample equals the full batch's.
fn of_first(out: &Tensor) -> Tensor {
    out.select(0, 0).sin().sum(Kind::Double)
}

pub const MEAN: Case = Case {
    name: "a mean",
    full: |out, target| vec![errors(out, target).mean(Kind::Double)],
    micro: |out, target| Loss::mean(errors(out, target).mean(Kind::Double)),
};

pub const SEVERAL: Case = Case {
    name: "several terms",
    full: |out, target| {
        let (sum, tokens) = over_tokens(out, target);
        vec![
            errors(out, target).mean(Kind::Double) * 0.5,
            sum / tokens,
            squares(out) * 0.1,
            of_first(out),
        ]
    },
    micro: |out, target| {
        let (sum, tokens) = over_tokens(out, target);
        Loss::mean(errors(out, target).mean(Kind::Double)) * 0.5
            + Loss::ratio(sum, tokens)
            + Loss::sum(squares(out)) * 0.1
            + Loss::once(of_first(out))
    },
};

pub const CASES: [Case; 4] = [
    MEAN,
    Case {
        name: "a mean over tokens",
        full: |out, target| {
            let (sum, tokens) = over_tokens(out, target);
            vec![sum / tokens]
        },
        micro: |out, target| {
            let (sum, tokens) = over_tokens(out, target);
            Loss::mean_over(sum / &tokens, tokens.double_value(&[]))
        },
    },
    Case {
        name: "a sum",
        full: |out, _| vec![squares(out)],
        micro: |out, _| Loss::sum(squares(out)),
    },
    SEVERAL,
];

/// Needs all rows at once.
pub const OF_ALL: WholeLoss =
    |out| out.matmul(&out.tr()).logsumexp([1_i64], false).sum(Kind::Double);

/// Plain model, with the values that every engine gets.
pub struct Plain {
    pub store: VarStore,
    pub model: Model,
    net: Net,
}

impl Plain {
    pub fn new(net: Net) -> Self {
        let mut store = VarStore::new(Device::Cpu);
        let model = (net.layers)(BatchNormPolicy::Deferred).build(&store.root()).expect("built");
        store.set_kind(Kind::Double);
        let plain = Self { store, model, net };
        plain.set_first_values();
        plain
    }

    fn set_first_values(&self) {
        for (name, mut variable) in self.store.variables() {
            let positive =
                name.ends_with("running_var") || name.contains("norm") && name.ends_with("weight");
            let value = numbers(&variable.size(), name.len() as i64) * 0.5;
            tch::no_grad(|| variable.copy_(&(if positive { value.square() + 0.5 } else { value })));
        }
    }

    /// Restores the initial state.
    pub fn reset(&self) {
        self.set_first_values();
        clear(&self.store);
    }

    pub fn values(&self) -> Named {
        variables(&self.store)
    }

    pub fn gradients(&self) -> Named {
        gradients(&self.store)
    }

    /// Returns the terms and gradients of these mini-batches as one, each cut as the engine cuts it.
    ///
    /// To the batcher it is one micro-batch, so no code for sums is shared with the compared engine. The batcher
    /// is used only so that statistics change once.
    pub fn backward(
        &self,
        engine: &dyn Engine,
        window: &[&Samples],
        seed: Option<u64>,
        terms: impl Fn(&Tensor, &Target) -> Vec<Tensor>,
    ) -> Vec<f64> {
        let mut micro = MicroBatcher::new(&self.store, MicroBatches::Count(1));
        let whole = joined(window);
        let step = micro.backward(&whole.0, |_| {
            let outputs: Vec<Tensor> =
                window.iter().flat_map(|(x, _)| self.outputs(engine, x, seed)).collect();
            let terms = terms(&Tensor::cat(&outputs, 0), &whole.1);
            let sums = terms.into_iter().map(Loss::sum);
            sums.reduce(|all, term| all + term).expect("a term")
        });
        step.expect("a plain step").terms
    }

    /// Returns the outputs of one mini-batch, piece by piece if the micro-batch size affects them.
    fn outputs(&self, engine: &dyn Engine, x: &Tensor, seed: Option<u64>) -> Vec<Tensor> {
        if !self.net.shows_cut {
            return vec![self.model.forward_t(x, true)];
        }
        if engine.about().is_exact {
            return vec![self.whole_output(engine, x, seed)];
        }
        let mut all = Vec::new();
        for (part, pieces) in cut(engine, x.size()[0] as usize).into_iter().enumerate() {
            for (number, piece) in pieces.into_iter().enumerate() {
                let x = x.narrow(0, piece.start as i64, piece.len() as i64);
                let seeded = |number| StepRng::new(seed.unwrap_or_default(), number);
                all.push(match engine.about().drawing {
                    Drawing::AsPlainLoop => {
                        if all.is_empty() {
                            seed_of(0);
                        }
                        self.model.forward_t(&x, true)
                    }
                    Drawing::ByPart => {
                        let part = engine.about().drawn_as(part);
                        tch::manual_seed(seeded(number).seed(part) as i64);
                        self.model.forward_t(&x, true)
                    }
                    Drawing::ByLayer => {
                        let drawn = self.model.forward_with_rng(&[x], true, seeded(all.len()));
                        drawn.into_iter().next().expect("an output")
                    }
                });
            }
        }
        all
    }

    /// Returns the output of a whole mini-batch, in which the micro-batch size affects only the random numbers.
    fn whole_output(&self, engine: &dyn Engine, x: &Tensor, seed: Option<u64>) -> Tensor {
        let pieces = cut(engine, x.size()[0] as usize).concat().into_iter().enumerate();
        let drawn = |(number, piece): (usize, Range<usize>)| {
            (piece.len() as i64, StepRng::new(seed.unwrap_or_default(), number))
        };
        PIECES.set(pieces.map(drawn).collect());
        let output = self.model.forward_t(x, true);
        PIECES.take();
        output
    }
}

/// Joins mini-batches into one.
pub fn joined(window: &[&Samples]) -> Samples {
    let all = |f: fn(&Samples) -> &Tensor| {
        Tensor::cat(&window.iter().map(|batch| f(batch)).collect::<Vec<_>>(), 0)
    };
    (all(|(x, _)| x), (all(|(_, y)| &y.0), all(|(_, y)| &y.1), all(|(_, y)| &y.2)))
}

/// Returns the micro-batches of each part of a mini-batch.
fn cut(engine: &dyn Engine, samples: usize) -> Vec<Vec<Range<usize>>> {
    let pieces = |part: Range<usize>| {
        let ranges = match (part.len(), engine.about().size) {
            (0, _) => Ok(Vec::new()),
            (samples, MicroBatches::Samples(size)) => split::by_size(samples, size),
            (samples, MicroBatches::Count(count)) => split::by_count(samples, count),
            (_, other) => panic!("{other:?} is cut as it comes"),
        };
        let ranges = ranges.expect("a cut").into_iter();
        ranges.map(|range| part.start + range.start..part.start + range.end).collect()
    };
    engine.about().dealt(samples).into_iter().map(pieces).collect()
}

/// Returns the samples of each micro-batch of this process.
pub fn own_sizes(engine: &dyn Engine, samples: usize) -> Vec<usize> {
    let own = cut(engine, samples)[engine.about().own.clone()].concat();
    own.iter().map(ExactSizeIterator::len).collect()
}

/// Makes an engine with the plain model's initial values.
pub fn engine(make: Make, net: Net, size: MicroBatches, world: &World) -> Box<dyn Engine> {
    engine_of(make, &Setup::new(net.layers, size, world), net)
}

pub fn engine_of(make: Make, setup: &Setup, net: Net) -> Box<dyn Engine> {
    let mut engine = make(setup);
    reset(&mut *engine, net);
    engine
}

/// Restores the plain model's initial values, no gradients, and the generator's state before every step.
pub fn reset(engine: &mut dyn Engine, net: Net) {
    engine.set_variables(&Plain::new(net).values());
    engine.zero_grad();
    seed(engine);
}

/// Restores the generator's state before every step.
pub fn seed(engine: &dyn Engine) {
    seed_of(engine.about().rank);
}

/// Restores the generator's state in this rank: another one in each, as only the first one's may count.
pub fn seed_of(rank: usize) {
    tch::manual_seed(SEED + rank as i64);
}

/// Returns everything that a step may change: values, gradients, and the generator's next numbers.
pub fn state(engine: &dyn Engine) -> Named {
    let mut all = copies(&engine.variables());
    for (name, gradient) in engine.gradients() {
        all.push((format!("the gradient of {name}"), gradient.copy()));
    }
    let now = generator_state(Device::Cpu).expect("state");
    all.push(("random numbers".into(), Tensor::rand([4], (Kind::Double, Device::Cpu))));
    set_generator_state(Device::Cpu, &now).expect("state");
    all
}
