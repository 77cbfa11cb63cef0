//! Random models from a grammar of graph shapes: uses of leaves, their number, and the views between.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};

use brimful::Layers;
use brimful::nn::{
    BatchNormConfig, BatchNormPolicy, Projection, ProjectionConfig, batch_norm1d, layer_norm,
    rms_norm,
};
use proptest::prelude::*;
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

/// Tensors between layers have the shape samples × TIME × WIDTH.
pub const TIME: i64 = 2;
pub const WIDTH: i64 = 3;
pub const CLASSES: i64 = 5;

/// Layer with one input and one output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Product with a weight.
    Linear,
    /// The library's projection, with a bias.
    Projected,
    /// The library's norms.
    LayerNorm,
    RmsNorm,
    /// Two tables added by broadcast: one gradient in two views.
    Tables,
    /// Two flat leaves, each viewed as a table.
    Views,
    /// Sum of two leaves.
    LeafSum,
    /// Two concatenated leaves: parts of one gradient.
    Joined,
    /// Both rows of one leaf, each added.
    Selected,
    /// Weight that is used twice.
    Twice,
    /// Leaf that is expanded.
    Expanded,
    /// 0-dim leaf.
    Scalar,
    /// Rows in the middle of a leaf.
    Sliced,
    /// Every other row of a leaf.
    Strided,
    /// Indexed rows of a leaf, one of them twice.
    Indexed,
    /// Product along the other dimension, whose output is not contiguous.
    Transposed,
    /// Result that is changed in place after its use.
    InPlace,
    /// Branch without a gradient, and a leaf that is used without one.
    Detached,
    /// Leaf that nothing uses, and one without elements.
    Unused,
    /// Intermediate tensor without elements.
    ZeroWidth,
    /// No leaf, and the gradient unchanged.
    Identity,
    /// No leaf, and a view of the gradient.
    Folded,
    Dropout,
    /// The weight of the first `Linear`, transposed; a layer of its own if there is none before.
    Tied,
    Norm(Policy),
}

/// Kind of a BatchNorm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Deferred,
    PerMicroBatch,
    Frozen,
    Exact,
    /// tch's own.
    Foreign,
}

/// Part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    One(Shape),
    /// Adds its input to its output.
    Skip(Vec<Block>),
    /// Two outputs; the second may be unused.
    Fork {
        uses_both: bool,
    },
}

/// Layer of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    One(Shape),
    Stash(usize),
    Pop(usize),
    Fork,
    Join { uses_both: bool },
}

/// Form of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    Numbers,
    /// Indices into a table, which is the first layer.
    Places,
    /// Indices into a table whose gradient is sparse, which is refused.
    SparsePlaces,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    pub input: Input,
    pub blocks: Vec<Block>,
}

pub fn shape() -> impl Strategy<Value = Shape> {
    let plain = prop::sample::select(vec![
        Shape::Linear,
        Shape::Projected,
        Shape::LayerNorm,
        Shape::RmsNorm,
        Shape::Tables,
        Shape::Views,
        Shape::LeafSum,
        Shape::Joined,
        Shape::Selected,
        Shape::Twice,
        Shape::Expanded,
        Shape::Scalar,
        Shape::Sliced,
        Shape::Strided,
        Shape::Indexed,
        Shape::Transposed,
        Shape::InPlace,
        Shape::Detached,
        Shape::Unused,
        Shape::ZeroWidth,
        Shape::Identity,
        Shape::Folded,
        Shape::Tied,
    ]);
    let policy = prop::sample::select(vec![
        Policy::Deferred,
        Policy::PerMicroBatch,
        Policy::Frozen,
        Policy::Exact,
        Policy::Foreign,
    ]);
    prop_oneof![
        20 => plain,
        1 => Just(Shape::Dropout),
        1 => policy.prop_map(Shape::Norm),
    ]
}

pub fn model() -> impl Strategy<Value = Model> {
    let leaf = prop_oneof![
        10 => shape().prop_map(Block::One),
        1 => any::<bool>().prop_map(|uses_both| Block::Fork { uses_both }),
    ];
    let block = leaf
        .prop_recursive(2, 6, 3, |inner| prop::collection::vec(inner, 1..4).prop_map(Block::Skip));
    let input = prop_oneof![
        25 => Just(Input::Numbers),
        5 => Just(Input::Places),
        1 => Just(Input::SparsePlaces),
    ];
    (input, prop::collection::vec(block, 1..6)).prop_map(|(input, blocks)| Model { input, blocks })
}

impl Model {
    /// Returns the layers in order.
    pub fn entries(&self) -> Vec<Entry> {
        fn flatten(blocks: &[Block], all: &mut Vec<Entry>, skips: &mut usize) {
            for block in blocks {
                match block {
                    Block::One(shape) => all.push(Entry::One(*shape)),
                    Block::Skip(inner) => {
                        let number = *skips;
                        *skips += 1;
                        all.push(Entry::Stash(number));
                        flatten(inner, all, skips);
                        all.push(Entry::Pop(number));
                    }
                    Block::Fork { uses_both } => {
                        all.extend([Entry::Fork, Entry::Join { uses_both: *uses_both }]);
                    }
                }
            }
        }
        let mut all = Vec::new();
        flatten(&self.blocks, &mut all, &mut 0);
        // A model without a leaf has nothing to train.
        all.push(Entry::One(Shape::Linear));
        all
    }

    fn has(&self, wanted: impl Fn(Shape) -> bool) -> bool {
        let wanted = |entry: &Entry| matches!(entry, Entry::One(shape) if wanted(*shape));
        self.entries().iter().any(wanted)
    }

    pub fn is_exact(&self) -> bool {
        self.has(|shape| shape == Shape::Norm(Policy::Exact))
    }

    pub fn draws(&self) -> bool {
        self.has(|shape| shape == Shape::Dropout)
    }

    /// Returns whether results depend on the micro-batch size.
    pub fn shows_cut(&self) -> bool {
        self.draws() || self.has(|shape| matches!(shape, Shape::Norm(_)))
    }

    /// Returns whether running statistics change at every micro-batch.
    pub fn moves_at_once(&self) -> bool {
        let at_once = [Policy::PerMicroBatch, Policy::Foreign].map(Shape::Norm);
        self.has(|shape| at_once.contains(&shape))
    }

    /// Returns the layers for engines.
    pub fn layers(&self) -> Layers {
        let mut layers = Layers::new();
        if self.input != Input::Numbers {
            let sparse = self.input == Input::SparsePlaces;
            layers = layers.add("table", move |p| {
                let table = p.randn("rows", &[CLASSES, WIDTH], 0.0, 1.0);
                nn::func(move |x| {
                    burn();
                    Tensor::embedding(&table, x, -1, false, sparse)
                })
            });
        }
        let entries = self.entries();
        for (at, entry) in entries.iter().enumerate() {
            let name = format!("l{at}");
            layers = match *entry {
                Entry::Stash(number) => layers.stash(format!("s{number}")),
                Entry::Pop(number) => layers.pop(name, format!("s{number}"), |x, skip| {
                    burn();
                    joined_skip(x, skip)
                }),
                Entry::Fork => layers.add_many(name, |p| {
                    let leaf = p.randn("leaf", &[WIDTH], 0.0, 1.0);
                    move |x: &[Tensor], _| fork(&x[0], &leaf)
                }),
                Entry::Join { uses_both } => {
                    layers.add_many(name, move |_| move |x: &[Tensor], _| vec![join(x, uses_both)])
                }
                Entry::One(Shape::Tied) => match owner(&entries, at) {
                    Some(owner) => layers.add_sharing(name, format!("l{owner}"), |_, other| {
                        let found = other.get("weight");
                        let weight = found
                            .unwrap_or_else(|| other.randn("weight", &[WIDTH, WIDTH], 0.0, 1.0));
                        nn::func(move |x| {
                            burn();
                            x.matmul(&weight.tr()).tanh()
                        })
                    }),
                    None => add_shape(layers, name, Shape::Linear),
                },
                Entry::One(shape) => add_shape(layers, name, shape),
            };
        }
        layers
    }
}

/// Returns the layer whose weight a tied one uses.
pub fn owner(entries: &[Entry], at: usize) -> Option<usize> {
    entries[..at].iter().position(|entry| *entry == Entry::One(Shape::Linear))
}

/// Calls of layers until one panics; below 0, none does.
static FUSE: AtomicI64 = AtomicI64::new(-1);

/// Makes the layer call with this number, from 0, panic.
pub fn set_fuse(calls: i64) {
    FUSE.store(calls, Ordering::SeqCst);
}

fn burn() {
    if FUSE.load(Ordering::SeqCst) >= 0 && FUSE.fetch_sub(1, Ordering::SeqCst) == 0 {
        panic!("the layer gives up");
    }
}

fn add_shape(layers: Layers, name: String, shape: Shape) -> Layers {
    match shape {
        Shape::Projected => layers.add(name, |p| {
            let config = ProjectionConfig { spread: 1.0, bias: true, inputs_first: false };
            burning(Projection::new(p, WIDTH, WIDTH, config))
        }),
        Shape::LayerNorm => layers.add(name, |p| burning(layer_norm(p, WIDTH))),
        Shape::RmsNorm => layers.add(name, |p| burning(rms_norm(p, WIDTH))),
        Shape::Norm(Policy::Foreign) => layers.add(name, |p| {
            let norm = nn::batch_norm1d(p, TIME, Default::default());
            nn::func_t(move |x, train| {
                burn();
                norm.forward_t(x, train)
            })
        }),
        Shape::Norm(Policy::Exact) => {
            layers.add_norm(name, |p| batch_norm1d(p, TIME, config(Policy::Exact)))
        }
        Shape::Norm(policy) => layers.add(name, move |p| {
            let norm = batch_norm1d(p, TIME, config(policy));
            nn::func_t(move |x, train| {
                burn();
                norm.forward_t(x, train)
            })
        }),
        shape => layers.add(name, move |p| {
            let leaves: Vec<Tensor> =
                leaves(shape).iter().map(|(name, size)| p.randn(name, size, 0.0, 1.0)).collect();
            nn::func_t(move |x, train| {
                burn();
                forward(shape, &leaves, x, train)
            })
        }),
    }
}

fn burning(module: impl Module + 'static) -> impl ModuleT {
    nn::func(move |x| {
        burn();
        module.forward(x)
    })
}

fn config(policy: Policy) -> BatchNormConfig {
    let policy = match policy {
        Policy::PerMicroBatch => BatchNormPolicy::PerMicroBatch,
        Policy::Frozen => BatchNormPolicy::Frozen,
        Policy::Exact => BatchNormPolicy::Exact,
        Policy::Deferred | Policy::Foreign => BatchNormPolicy::Deferred,
    };
    BatchNormConfig { policy, ..Default::default() }
}

/// Returns names and sizes of a layer's leaves, in the order that [`forward`] takes them.
pub fn leaves(shape: Shape) -> Vec<(&'static str, Vec<i64>)> {
    let table = vec![TIME, WIDTH];
    let flat = vec![TIME * WIDTH];
    match shape {
        Shape::Linear | Shape::Twice => vec![("weight", vec![WIDTH, WIDTH])],
        Shape::Projected => vec![("weight", vec![WIDTH, WIDTH]), ("bias", vec![WIDTH])],
        Shape::LayerNorm => vec![("weight", vec![WIDTH]), ("bias", vec![WIDTH])],
        Shape::RmsNorm => vec![("weight", vec![WIDTH])],
        Shape::Tables | Shape::LeafSum => vec![("a", table.clone()), ("b", table)],
        Shape::Views => vec![("a", flat.clone()), ("b", flat)],
        Shape::Joined => vec![("a", vec![1, WIDTH]), ("b", vec![TIME - 1, WIDTH])],
        Shape::Selected => vec![("rows", vec![2, WIDTH])],
        Shape::Expanded => vec![("row", vec![1, WIDTH])],
        Shape::Scalar => vec![("scalar", vec![])],
        Shape::Sliced => vec![("rows", vec![TIME + 2, WIDTH])],
        Shape::Strided => vec![("rows", vec![2 * TIME, WIDTH])],
        Shape::Indexed => vec![("rows", vec![3, WIDTH])],
        Shape::Transposed => vec![("weight", vec![TIME, TIME])],
        Shape::InPlace => vec![("row", vec![WIDTH])],
        Shape::Detached => vec![("row", vec![WIDTH]), ("still", vec![WIDTH])],
        Shape::Unused => vec![("never", vec![2]), ("nothing", vec![0, WIDTH])],
        Shape::Norm(_) => vec![("weight", vec![TIME]), ("bias", vec![TIME])],
        Shape::ZeroWidth | Shape::Identity | Shape::Folded | Shape::Dropout | Shape::Tied => vec![],
    }
}

/// Runs the layer on its leaves. The library's layers are computed by libtorch's own operations.
pub fn forward(shape: Shape, leaves: &[Tensor], x: &Tensor, train: bool) -> Tensor {
    let size = x.size();
    match shape {
        Shape::Linear => x.linear(&leaves[0], None::<Tensor>).tanh(),
        Shape::Projected => x.linear(&leaves[0], Some(&leaves[1])),
        Shape::LayerNorm => x.layer_norm([WIDTH], Some(&leaves[0]), Some(&leaves[1]), 1e-5, false),
        Shape::RmsNorm => {
            let mean = x.square().mean_dim(-1, true, None::<Kind>);
            x * (mean + 1e-6).rsqrt() * &leaves[0]
        }
        Shape::Tables => x + leaves[0].unsqueeze(0) + leaves[1].unsqueeze(0),
        Shape::Views => x + leaves[0].view([1, TIME, WIDTH]) + leaves[1].view([1, TIME, WIDTH]),
        Shape::LeafSum => x + (&leaves[0] + &leaves[1]),
        Shape::Joined => x + Tensor::cat(&[&leaves[0], &leaves[1]], 0).unsqueeze(0),
        Shape::Selected => x + leaves[0].select(0, 0) + leaves[0].select(0, 1),
        Shape::Twice => x.matmul(&leaves[0]).tanh().matmul(&leaves[0]),
        Shape::Expanded => x * leaves[0].expand([TIME, WIDTH], false),
        Shape::Scalar => x * &leaves[0],
        Shape::Sliced => x + leaves[0].narrow(0, 1, TIME).unsqueeze(0),
        Shape::Strided => x + leaves[0].slice(0, 0, 2 * TIME, 2).unsqueeze(0),
        Shape::Indexed => {
            let rows = Tensor::from_slice(&[2i64, 0, 2]).to_device(x.device());
            x * leaves[0].index_select(0, &rows).sum_dim_intlist(0, false, None::<Kind>)
        }
        Shape::Transposed => x.transpose(1, 2).matmul(&leaves[0]).transpose(1, 2),
        Shape::InPlace => {
            let mut sum = x + &leaves[0];
            let double = &sum * 2.0;
            let _itself = sum.g_add_scalar_(0.5);
            sum + double.sin()
        }
        Shape::Detached => x + (x.detach() * &leaves[0]).tanh() + leaves[1].detach(),
        Shape::Unused => x + leaves[1].sum(None::<Kind>),
        Shape::ZeroWidth => Tensor::cat(&[x.narrow(2, 0, 0), x.shallow_clone()], 2),
        Shape::Identity => x + 0.25,
        Shape::Folded => x.reshape([size[0], TIME * WIDTH]).reshape(&size[..]),
        // Masks are drawn in memory order.
        Shape::Dropout => x.contiguous().dropout(0.3, train),
        Shape::Norm(_) | Shape::Tied => unreachable!("built apart"),
    }
}

pub fn joined_skip(x: &Tensor, skip: &Tensor) -> Tensor {
    x + skip.tanh()
}

pub fn fork(x: &Tensor, leaf: &Tensor) -> Vec<Tensor> {
    vec![x + leaf, x * leaf]
}

pub fn join(x: &[Tensor], uses_both: bool) -> Tensor {
    if uses_both { &x[0] + &x[1] } else { x[0].shallow_clone() }
}

/// Returns initial values by name: of leaves, and of running statistics.
pub fn first_value(name: &str, size: &[i64]) -> Tensor {
    let seed: i64 = name.bytes().map(i64::from).sum();
    let value = crate::support::numbers(size, seed) * 0.7;
    let positive = name.ends_with("running_var") || size == [TIME] && name.ends_with("weight");
    if positive { value.square() + 0.5 } else { value }
}

/// Mini-batch: inputs, targets, and each sample's weight and number.
#[derive(Debug)]
pub struct Samples {
    pub x: Tensor,
    pub target: Target,
}

pub type Target = (Tensor, Tensor, Tensor);

impl Samples {
    pub fn new(model: &Model, count: usize, seed: i64, kind: Kind) -> Self {
        let n = count as i64;
        let numbers = |size: &[i64], seed: i64| crate::support::numbers(size, seed).to_kind(kind);
        let x = match model.input {
            Input::Numbers => numbers(&[n, TIME, WIDTH], seed),
            _ => (crate::support::numbers(&[n, TIME], seed).abs() * CLASSES as f64)
                .floor()
                .clamp(0.0, CLASSES as f64 - 1.0)
                .to_kind(Kind::Int64),
        };
        let y = numbers(&[n, TIME, WIDTH], seed + 11);
        let weight = (crate::support::numbers(&[n], seed + 5).abs() * 3.0).ceil().to_kind(kind);
        Self { x, target: (y, weight, Tensor::arange(n, (Kind::Int64, Device::Cpu))) }
    }

    pub fn len(&self) -> usize {
        self.x.size()[0] as usize
    }

    pub fn rows(&self, start: usize, length: usize) -> Self {
        let rows = |t: &Tensor| t.narrow(0, start as i64, length as i64);
        let (y, weight, number) = &self.target;
        Self { x: rows(&self.x), target: (rows(y), rows(weight), rows(number)) }
    }
}

/// Denominator of a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    Samples,
    Weights,
    /// Weights, with the division left to the library.
    Ratio,
    Nothing,
}

/// Terms of a loss, each with its factor in quarters.
pub type Terms = Vec<(Over, u8)>;

pub fn terms() -> impl Strategy<Value = Terms> {
    let over = prop::sample::select(vec![Over::Samples, Over::Weights, Over::Ratio, Over::Nothing]);
    prop::collection::vec((over, 1u8..8), 1..4)
}

/// Returns the sum of the term with this number over the samples, and its divisor, for each kind of denominator.
pub fn term(number: usize, over: Over, out: &Tensor, target: &Target) -> (Tensor, Tensor) {
    let (y, weight, _) = target;
    let kind = out.kind();
    let each =
        (out - y * (1.0 + number as f64)).square().mean_dim([1i64, 2].as_slice(), false, kind);
    match over {
        Over::Samples => (each.sum(kind), each.ones_like().detach().sum(kind)),
        Over::Nothing => (each.sum(kind), Tensor::ones([], (kind, out.device()))),
        Over::Weights | Over::Ratio => ((each * weight).sum(kind), weight.sum(kind)),
    }
}

/// Returns target classes for a head, for each position of each sample.
pub fn classes(target: &Target) -> Tensor {
    let time = Tensor::arange(TIME, (Kind::Int64, target.2.device()));
    (target.2.unsqueeze(1) * 7 + time).remainder(CLASSES)
}

/// Loss that needs all rows at once.
pub fn whole_loss(out: &Tensor, temperature: Option<&Tensor>) -> Tensor {
    let rows = out.flatten(1, -1);
    let likeness = rows.matmul(&rows.tr());
    let likeness = match temperature {
        Some(temperature) => likeness * temperature,
        None => likeness,
    };
    likeness.logsumexp([0], false).sum(out.kind())
}

/// Variables by name.
pub type Values = BTreeMap<String, Tensor>;

/// Returns whether a variable is a running statistic.
pub fn is_statistic(name: &str) -> bool {
    name.contains("running_") || name.ends_with("num_batches_tracked")
}

/// Returns the variable names of an entry's leaves.
pub fn names(entries: &[Entry], at: usize) -> Vec<String> {
    let Entry::One(shape) = entries[at] else {
        return if entries[at] == Entry::Fork { vec![format!("l{at}.leaf")] } else { vec![] };
    };
    match (shape, owner(entries, at)) {
        (Shape::Tied, Some(owner)) => vec![format!("l{owner}.weight")],
        (Shape::Tied, None) => vec![format!("l{at}.weight")],
        _ => leaves(shape).iter().map(|(name, _)| format!("l{at}.{name}")).collect(),
    }
}
