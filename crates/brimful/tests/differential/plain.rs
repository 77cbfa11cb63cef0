//! Plain model: the whole mini-batch at once in f64, by libtorch's own operations and one backward, with a
//! minimal optimizer.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use brimful::StepRng;
use tch::{Device, Kind, Tensor};

use crate::model::{
    Entry, Input, Model, Policy, Samples, Shape, Terms, Values, classes, first_value, fork,
    forward, is_statistic, join, joined_skip, leaves, names, owner, term, whole_loss,
};

pub const MOMENTUM: f64 = 0.9;
/// Lower bounds of Adafactor's and Muon's divisors, so that rounding errors of a zero gradient stay small.
pub const LEAST_SQUARE: f64 = 0.1;
pub const LEAST_SIZE: f64 = 0.1;
pub const LEAST_NORM: f64 = 1e-2;
/// Epsilon of AdamW, for the same reason, and its weight decay.
pub const LEAST_ROOT: f64 = 0.1;
pub const DECAY: f64 = 0.1;
/// As Muon, which leaves vectors to AdamW, adds.
const USUAL_ROOT: f64 = 1e-8;

/// Optimizer of a case. Both models use it, with results that are equal up to rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Updates {
    Sgd,
    SgdBf16,
    SgdEightBit,
    AdamW,
    Adafactor,
    Muon,
}
const EPSILON: f64 = 1e-5;

/// Source of a micro-batch's random numbers.
#[derive(Debug, Clone, Copy)]
pub enum Draw {
    /// The default generator, as in a plain loop.
    Loop,
    /// One seed.
    Seed(u64),
    /// A seed for each layer.
    Layers(StepRng),
}

/// Samples that an engine has run together. Only those of part 0 change statistics that update at every
/// micro-batch.
#[derive(Debug, Clone)]
pub struct Piece {
    pub rows: Range<usize>,
    pub draw: Draw,
    pub part: usize,
}

/// Intermediate values of one piece.
struct Flow {
    values: Vec<Tensor>,
    skips: BTreeMap<usize, Tensor>,
}

/// Mini-batch that was run but not committed.
pub struct Run {
    leaves: Values,
    /// Sum and divisor of each term.
    sums: Vec<(Tensor, f64)>,
    pub outputs: Tensor,
    seen: Seen,
}

/// Inputs of each norm, with their part.
type Seen = BTreeMap<usize, Vec<(usize, Tensor)>>;

pub struct Plain {
    model: Model,
    /// True to add a head's cross-entropy as a further term.
    head: bool,
    entries: Vec<Entry>,
    device: Device,
    pub values: Values,
    pub gradients: Values,
    pub frozen: BTreeSet<String>,
    updates: Updates,
    /// Moments of each variable, and its number of steps.
    moments: BTreeMap<String, (Vec<Tensor>, i32)>,
    pub rate: f64,
}

impl Plain {
    pub fn new(model: &Model, head: bool, device: Device, (updates, rate): (Updates, f64)) -> Self {
        let entries = model.entries();
        let mut plain = Self {
            model: model.clone(),
            head,
            entries,
            device,
            values: Values::new(),
            gradients: Values::new(),
            frozen: BTreeSet::new(),
            updates,
            moments: BTreeMap::new(),
            rate,
        };
        plain.make_values();
        plain
    }

    fn make_values(&mut self) {
        let mut sizes: Vec<(String, Vec<i64>)> = Vec::new();
        if self.model.input != Input::Numbers {
            sizes.push(("table.rows".into(), vec![crate::model::CLASSES, crate::model::WIDTH]));
        }
        if self.head {
            sizes.push(("head".into(), vec![crate::model::CLASSES, crate::model::WIDTH]));
        }
        for (at, entry) in self.entries.iter().enumerate() {
            let own = match entry {
                Entry::One(Shape::Tied) if owner(&self.entries, at).is_some() => vec![],
                Entry::One(Shape::Tied) => leaves(Shape::Linear),
                Entry::One(shape) => leaves(*shape),
                Entry::Fork => vec![("leaf", vec![crate::model::WIDTH])],
                _ => vec![],
            };
            sizes.extend(own.into_iter().map(|(name, size)| (format!("l{at}.{name}"), size)));
            if let Entry::One(Shape::Norm(_)) = entry {
                let statistic = |name| (format!("l{at}.{name}"), vec![crate::model::TIME]);
                sizes.extend(["running_mean", "running_var"].map(statistic));
            }
        }
        let value = |(name, size): (String, Vec<i64>)| {
            let value = first_value(&name, &size).to_device(self.device);
            (name, value)
        };
        self.values = sizes.into_iter().map(value).collect();
    }

    /// Returns the names of trainable variables.
    pub fn trainable(&self) -> Vec<String> {
        self.values.keys().filter(|name| !is_statistic(name)).cloned().collect()
    }

    fn fresh_leaves(&self) -> Values {
        let leaf = |(name, value): (&String, &Tensor)| {
            let trained = !is_statistic(name) && !self.frozen.contains(name);
            (name.clone(), value.detach().copy().set_requires_grad(trained))
        };
        self.values.iter().map(leaf).collect()
    }

    /// Returns the outputs of all pieces, in order.
    fn outputs(
        &self,
        leaves: &Values,
        samples: &Samples,
        pieces: &[Piece],
        train: bool,
        seen: &mut Seen,
    ) -> Tensor {
        let start = |piece: &Piece| {
            let x = samples.rows(piece.rows.start, piece.rows.len()).x.to_device(self.device);
            let x = if x.kind() == Kind::Int64 { x } else { x.to_kind(Kind::Double) };
            Flow { values: vec![x], skips: BTreeMap::new() }
        };
        let mut flows: Vec<Flow> = pieces.iter().map(start).collect();
        if self.model.is_exact() {
            self.run(leaves, &mut flows, pieces, train, seen);
        } else {
            for (flow, piece) in flows.iter_mut().zip(pieces) {
                self.run(
                    leaves,
                    std::slice::from_mut(flow),
                    std::slice::from_ref(piece),
                    train,
                    seen,
                );
            }
        }
        let outputs: Vec<Tensor> =
            flows.into_iter().map(|mut flow| flow.values.remove(0)).collect();
        Tensor::cat(&outputs, 0)
    }

    /// Runs these pieces through one layer after the other.
    fn run(
        &self,
        leaves: &Values,
        flows: &mut [Flow],
        pieces: &[Piece],
        train: bool,
        seen: &mut Seen,
    ) {
        let shift = usize::from(self.model.input != Input::Numbers);
        if let [Piece { draw: Draw::Seed(seed), .. }] = pieces {
            tch::manual_seed(*seed as i64);
        }
        if shift == 1 {
            for flow in flows.iter_mut() {
                flow.values[0] =
                    Tensor::embedding(&leaves["table.rows"], &flow.values[0], -1, false, false);
            }
        }
        for (at, entry) in self.entries.iter().enumerate() {
            if let Entry::One(Shape::Norm(policy)) = *entry {
                self.normalise(leaves, flows, pieces, (at, policy), train, seen);
                continue;
            }
            for (flow, piece) in flows.iter_mut().zip(pieces) {
                if let Draw::Layers(draws) = piece.draw {
                    tch::manual_seed(draws.seed(at + shift) as i64);
                }
                self.step_entry(leaves, flow, at, *entry, train);
            }
        }
    }

    fn step_entry(&self, all: &Values, flow: &mut Flow, at: usize, entry: Entry, train: bool) {
        let own: Vec<Tensor> =
            names(&self.entries, at).iter().map(|name| all[name].shallow_clone()).collect();
        let x = flow.values[0].shallow_clone();
        flow.values = match entry {
            Entry::Stash(number) => {
                flow.skips.insert(number, x.shallow_clone());
                vec![x]
            }
            Entry::Pop(number) => vec![joined_skip(&x, &flow.skips[&number])],
            Entry::Fork => fork(&x, &own[0]),
            Entry::Join { uses_both } => vec![join(&flow.values, uses_both)],
            Entry::One(Shape::Tied) if owner(&self.entries, at).is_none() => {
                vec![forward(Shape::Linear, &own, &x, train)]
            }
            Entry::One(Shape::Tied) => vec![x.matmul(&own[0].tr()).tanh()],
            Entry::One(shape) => vec![forward(shape, &own, &x, train)],
        };
    }

    fn normalise(
        &self,
        all: &Values,
        flows: &mut [Flow],
        pieces: &[Piece],
        (at, policy): (usize, Policy),
        train: bool,
        seen: &mut Seen,
    ) {
        let named = |name: &str| all[&format!("l{at}.{name}")].view([1, -1, 1]);
        let by_running = !train || policy == Policy::Frozen;
        let inputs: Vec<Tensor> = flows.iter().map(|flow| flow.values[0].shallow_clone()).collect();
        let of = |x: &Tensor| moments(x).map(|moment| moment.view([1, -1, 1]));
        let whole = (policy == Policy::Exact && !by_running).then(|| of(&Tensor::cat(&inputs, 0)));
        for (flow, x) in flows.iter_mut().zip(&inputs) {
            let [mean, variance] = match &whole {
                _ if by_running => [named("running_mean"), named("running_var")],
                Some(moments) => moments.each_ref().map(Tensor::shallow_clone),
                None => of(x),
            };
            flow.values[0] =
                (x - mean) / (variance + EPSILON).sqrt() * named("weight") + named("bias");
        }
        if !by_running {
            let inputs = pieces.iter().zip(inputs).map(|(piece, x)| (piece.part, x.detach()));
            seen.entry(at).or_default().extend(inputs);
        }
    }

    /// Runs a mini-batch in training, without committing it.
    pub fn run_batch(&self, samples: &Samples, pieces: &[Piece], terms: &Terms) -> Run {
        let leaves = self.fresh_leaves();
        let mut seen = Seen::new();
        let outputs = self.outputs(&leaves, samples, pieces, true, &mut seen);
        let sums = self.sums(&leaves, &outputs, samples, terms);
        Run { leaves, sums, outputs: outputs.detach(), seen }
    }

    fn sums(
        &self,
        leaves: &Values,
        outputs: &Tensor,
        samples: &Samples,
        terms: &Terms,
    ) -> Vec<(Tensor, f64)> {
        let wide = |t: &Tensor| t.to_device(self.device).to_kind(Kind::Double);
        let (y, weight, number) = &samples.target;
        let target = (wide(y), wide(weight), number.shallow_clone());
        let sum = |(number, (over, _)): (usize, &(crate::model::Over, u8))| {
            let (sum, count) = term(number, *over, outputs, &target);
            (sum, count.double_value(&[]))
        };
        let mut sums: Vec<(Tensor, f64)> = terms.iter().enumerate().map(sum).collect();
        if self.head {
            let classes = classes(&target).to_device(self.device).view([-1]);
            let logits = outputs.matmul(&leaves["head"].tr()).reshape([-1, crate::model::CLASSES]);
            let each = -logits.log_softmax(1, Kind::Double).gather(1, &classes.unsqueeze(1), false);
            sums.push((each.sum(Kind::Double), classes.size()[0] as f64));
        }
        sums
    }

    /// Commits these mini-batches as one step; returns its loss.
    pub fn commit(&mut self, runs: Vec<Run>, terms: &Terms) -> f64 {
        let divisor = |number: usize| {
            let all: f64 = runs.iter().map(|run| run.sums[number].1).sum();
            match terms.get(number) {
                Some((crate::model::Over::Nothing, _)) => 1.0,
                _ => all,
            }
        };
        let mut loss = 0.0;
        let mut seen = Seen::new();
        for run in &runs {
            let scaled = |(number, (sum, _)): (usize, &(Tensor, f64))| {
                sum * (factor(terms, number) / divisor(number))
            };
            let own = run.sums.iter().enumerate().map(scaled).reduce(|a, b| a + b).expect("a term");
            loss += own.double_value(&[]);
            self.add_gradients(&run.leaves, &own);
            for (at, inputs) in &run.seen {
                let inputs = inputs.iter().map(|(part, x)| (*part, x.shallow_clone()));
                seen.entry(*at).or_default().extend(inputs);
            }
        }
        self.move_statistics(&seen);
        loss
    }

    /// Runs a step on a loss of all outputs; returns loss, outputs, and the gradient of the temperature.
    pub fn whole(
        &mut self,
        samples: &Samples,
        pieces: &[Piece],
        temperature: Option<&Tensor>,
    ) -> (f64, Tensor, Option<f64>) {
        let leaves = self.fresh_leaves();
        let mut seen = Seen::new();
        let outputs = self.outputs(&leaves, samples, pieces, true, &mut seen);
        let loss = whole_loss(&outputs, temperature);
        let of_leaf = temperature.map(|leaf| Tensor::run_backward(&[&loss], &[leaf], true, false));
        self.add_gradients(&leaves, &loss);
        self.move_statistics(&seen);
        (loss.double_value(&[]), outputs.detach(), of_leaf.map(|all| all[0].double_value(&[])))
    }

    /// Returns the loss and outputs without training.
    pub fn evaluate(&self, samples: &Samples, terms: &Terms) -> (f64, Tensor) {
        let piece = Piece { rows: 0..samples.len(), draw: Draw::Loop, part: 0 };
        let leaves = self.fresh_leaves();
        let outputs = self.outputs(&leaves, samples, &[piece], false, &mut Seen::new());
        let value = |(number, (sum, count)): (usize, (Tensor, f64))| {
            sum.double_value(&[]) / count * factor(terms, number)
        };
        let sums = self.sums(&leaves, &outputs, samples, terms);
        let loss = sums.into_iter().enumerate().map(value).sum();
        (loss, outputs.detach())
    }

    fn add_gradients(&mut self, leaves: &Values, loss: &Tensor) {
        let trained: Vec<_> = leaves.iter().filter(|(_, leaf)| leaf.requires_grad()).collect();
        if trained.is_empty() || !loss.requires_grad() {
            return;
        }
        let inputs: Vec<_> = trained.iter().map(|(_, leaf)| *leaf).collect();
        let found = Tensor::run_backward(&[loss], &inputs, false, false);
        for ((name, _), new) in trained.into_iter().zip(found) {
            if !new.defined() {
                continue;
            }
            let sum = match self.gradients.get(name) {
                Some(old) => old + new,
                None => new.copy(),
            };
            self.gradients.insert(name.clone(), sum);
        }
    }

    fn move_statistics(&mut self, seen: &Seen) {
        for (at, inputs) in seen {
            let Entry::One(Shape::Norm(policy)) = self.entries[*at] else { continue };
            let moved: Vec<Tensor> = match policy {
                Policy::PerMicroBatch | Policy::Foreign => {
                    let first = inputs.iter().filter(|(part, _)| *part == 0);
                    first.map(|(_, x)| x.shallow_clone()).collect()
                }
                _ => {
                    let all: Vec<_> = inputs.iter().map(|(_, x)| x).collect();
                    vec![Tensor::cat(&all, 0)]
                }
            };
            for x in moved {
                let count = (x.size()[0] * x.size()[2]) as f64;
                let [mean, variance] = moments(&x);
                let variance = variance * (count / (count - 1.0));
                for (name, new) in [("running_mean", mean), ("running_var", variance)] {
                    let old = &self.values[&format!("l{at}.{name}")];
                    let moved = old * 0.9 + new * 0.1;
                    self.values.insert(format!("l{at}.{name}"), moved);
                }
            }
        }
    }

    /// Updates the variables that have a gradient and are not frozen.
    pub fn update(&mut self) {
        let names: Vec<String> = self.gradients.keys().cloned().collect();
        for name in names.into_iter().filter(|name| !self.frozen.contains(name)) {
            let gradient = &self.gradients[&name];
            let (moments, steps) = self.moments.entry(name.clone()).or_default();
            *steps += 1;
            let state = (moments, *steps);
            let value = &self.values[&name];
            let value = match self.updates {
                Updates::Adafactor => adafactor(value, gradient, state, self.rate),
                Updates::Muon if gradient.dim() == 2 => muon(value, gradient, state.0, self.rate),
                Updates::Muon => adamw(value, gradient, state, (self.rate, USUAL_ROOT)),
                Updates::AdamW => adamw(value, gradient, state, (self.rate, LEAST_ROOT)),
                _ => {
                    let momentum = match state.0.first() {
                        Some(old) => old * MOMENTUM + gradient,
                        None => gradient.copy(),
                    };
                    *state.0 = vec![momentum.shallow_clone()];
                    value - momentum * self.rate
                }
            };
            self.values.insert(name, value);
        }
    }

    /// Scales all gradients, including those of frozen leaves; returns the norm, or none without gradients.
    pub fn clip(&mut self, max: f64) -> Option<f64> {
        let square = |gradient: &Tensor| gradient.square().sum(Kind::Double).double_value(&[]);
        let squares: Vec<f64> = self.gradients.values().map(square).collect();
        let norm = squares.iter().sum::<f64>().sqrt();
        let factor = (max / (norm + 1e-6)).min(1.0);
        for gradient in self.gradients.values_mut() {
            *gradient = &*gradient * factor;
        }
        (!squares.is_empty()).then_some(norm)
    }
}

type State<'a> = (&'a mut Vec<Tensor>, i32);

fn size(of: &Tensor) -> f64 {
    of.square().mean(Kind::Double).double_value(&[]).sqrt()
}

fn adafactor(value: &Tensor, gradient: &Tensor, (moments, steps): State<'_>, rate: f64) -> Tensor {
    let steps = f64::from(steps);
    let share = steps.powf(-0.8);
    let square = gradient.square();
    let means = match gradient.dim() {
        0 | 1 => vec![square],
        _ => [-1i64, -2].map(|dim| square.mean_dim([dim].as_slice(), true, Kind::Double)).into(),
    };
    if moments.is_empty() {
        *moments = means.iter().map(Tensor::zeros_like).collect();
    }
    let follow = |(old, new): (&Tensor, Tensor)| old * (1.0 - share) + new * share;
    *moments = moments.iter().zip(means).map(follow).collect();
    let estimate = match &moments[..] {
        [rows, columns] => {
            let mean = rows.mean_dim([-2i64].as_slice(), true, Kind::Double);
            rows * columns / mean.clamp_min(LEAST_SQUARE)
        }
        _ => moments[0].copy(),
    };
    let direction = gradient / estimate.clamp_min(LEAST_SQUARE * LEAST_SQUARE).sqrt();
    let step = size(value).max(LEAST_SIZE) * rate.min(1.0 / steps.sqrt());
    value - &direction * (step / size(&direction).max(1.0))
}

fn muon(value: &Tensor, gradient: &Tensor, moments: &mut Vec<Tensor>, rate: f64) -> Tensor {
    let old = moments.pop().unwrap_or_else(|| gradient.zeros_like());
    let momentum = old * 0.95 + gradient * 0.05;
    let direction = gradient * 0.05 + &momentum * 0.95;
    moments.push(momentum);
    let (rows, columns) = (gradient.size()[0] as f64, gradient.size()[1] as f64);
    let mut x = if rows > columns { direction.tr() } else { direction };
    x = &x / x.norm().clamp_min(LEAST_NORM);
    for _ in 0..5 {
        let gram = x.matmul(&x.tr());
        x = &x * 3.4445 + (&gram * -4.7750 + gram.matmul(&gram) * 2.0315).matmul(&x);
    }
    let x = if rows > columns { x.tr() } else { x };
    value * (1.0 - rate * 0.1) - x * (rate * (rows / columns).max(1.0).sqrt())
}

fn adamw(
    value: &Tensor,
    gradient: &Tensor,
    (moments, steps): State<'_>,
    (rate, eps): (f64, f64),
) -> Tensor {
    if moments.is_empty() {
        *moments = vec![gradient.zeros_like(), gradient.zeros_like()];
    }
    *moments =
        vec![&moments[0] * 0.9 + gradient * 0.1, &moments[1] * 0.999 + gradient.square() * 0.001];
    let corrected = |at: usize, beta: f64| &moments[at] / (1.0 - beta.powi(steps));
    let direction = corrected(0, 0.9) / (corrected(1, 0.999).sqrt() + eps);
    value * (1.0 - rate * DECAY) - direction * rate
}

/// Returns the factor of a term; a head's is 1.
fn factor(terms: &Terms, number: usize) -> f64 {
    terms.get(number).map_or(1.0, |(_, quarters)| f64::from(*quarters) * 0.25)
}

/// Returns mean and variance of each channel.
fn moments(x: &Tensor) -> [Tensor; 2] {
    let dims = [0i64, 2];
    let mean = x.mean_dim(dims.as_slice(), true, Kind::Double);
    let variance = (x - &mean).square().mean_dim(dims.as_slice(), false, Kind::Double);
    [mean.view([-1]), variance]
}
