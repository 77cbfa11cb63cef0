//! Script of operations on an engine and on the plain model, and their comparison.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, PoisonError};

use brimful::nn::linear_cross_entropy;
use brimful::pipeline::PipelineError;
use brimful::{Error, Loss, MicroBatches, StepRng, World};
use brimful_plan::split;
use brimful_torch::random::{GeneratorState, generator_state, set_generator_state};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use crate::engines::{Cut, Engine, LossFn, Reported, Setup, Subject, WholeFn, cut, engine};
use crate::model::{
    Block, Model, Over, Policy, Samples, Shape, Target, Terms, Values, is_statistic, model,
    set_fuse, terms, whole_loss,
};
use crate::plain::{Draw, Piece, Plain, Run, Updates};
use crate::support::pipeline_cases::drawn_seed;
use crate::support::{Named, assert_near, copies, numbers, test_device, words_of};

const RATE: f64 = 0.05;

/// Dtype of the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Number {
    F64,
    F32,
    Bf16,
}

impl Number {
    fn kind(self) -> Kind {
        match self {
            Self::F64 => Kind::Double,
            Self::F32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
        }
    }

    /// Returns the tolerance of results, relative to the largest value of a tensor, and the threshold of small
    /// values.
    fn bounds(self) -> (f64, f64) {
        match self {
            Self::F64 => (1e-10, 1e-2),
            Self::F32 => (2e-3, 1e-1),
            Self::Bf16 => (0.6, 6.0),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    Backward {
        samples: usize,
    },
    Accumulate {
        samples: usize,
    },
    Commit,
    /// Loss on all outputs, with or without a leaf of its own; in two calls where the engine has such.
    Whole {
        samples: usize,
        leaf: bool,
        in_two: bool,
    },
    Evaluate {
        samples: usize,
    },
    Map {
        samples: usize,
    },
    Update,
    ZeroGrad,
    Clip(u8),
    Rate(u8),
    Freeze(u8),
    Unfreeze(u8),
    /// Sets another value by hand.
    Value(u8),
    /// Scales a gradient by 0.5, by hand.
    Gradient(u8),
    /// Saves, overwrites everything, and loads.
    SaveAndLoad,
    Resize(Cut),
}

/// Fault injected into a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// NaN loss of the micro-batch with this sample.
    Nan(u8),
    /// Panic in the layer call with this number, from 0.
    Panic(u8),
    /// Failure of the allocation with this number, from 1, in one of the memories.
    Allocation { memory: u8, number: u16 },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub op: Op,
    pub fault: Option<Fault>,
    /// Rank with the fault.
    pub rank: u8,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    pub model: Model,
    pub engine: Engine,
    pub cut: Cut,
    pub number: Number,
    pub updates: Updates,
    /// True to refuse non-finite gradients too.
    pub strict: bool,
    /// True to add a head's cross-entropy as a further term, if the loss may have leaves.
    pub head: bool,
    pub terms: Terms,
    pub script: Vec<Call>,
}

fn op() -> impl Strategy<Value = Op> {
    let samples = || 1usize..9;
    prop_oneof![
        6 => samples().prop_map(|samples| Op::Backward { samples }),
        3 => samples().prop_map(|samples| Op::Accumulate { samples }),
        2 => Just(Op::Commit),
        2 => (samples(), prop::bool::weighted(0.3), any::<bool>())
            .prop_map(|(samples, leaf, in_two)| Op::Whole { samples, leaf, in_two }),
        1 => samples().prop_map(|samples| Op::Evaluate { samples }),
        1 => samples().prop_map(|samples| Op::Map { samples }),
        3 => Just(Op::Update),
        2 => Just(Op::ZeroGrad),
        1 => any::<u8>().prop_map(Op::Clip),
        1 => any::<u8>().prop_map(Op::Rate),
        1 => any::<u8>().prop_map(Op::Freeze),
        1 => any::<u8>().prop_map(Op::Unfreeze),
        1 => any::<u8>().prop_map(Op::Value),
        1 => any::<u8>().prop_map(Op::Gradient),
        1 => Just(Op::SaveAndLoad),
        1 => cut().prop_map(Op::Resize),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    let fault = prop_oneof![
        (0u8..8).prop_map(Fault::Nan),
        (0u8..40).prop_map(Fault::Panic),
        (0u8..3, 1u16..200).prop_map(|(memory, number)| Fault::Allocation { memory, number }),
    ];
    let fault = prop_oneof![5 => Just(None), 1 => fault.prop_map(Some)];
    (op(), fault, 0u8..3).prop_map(|(op, fault, rank)| Call { op, fault, rank })
}

pub fn case() -> impl Strategy<Value = Case> {
    let number =
        prop_oneof![8 => Just(Number::F64), 1 => Just(Number::F32), 1 => Just(Number::Bf16)];
    let updates = prop_oneof![
        6 => Just(Updates::Sgd),
        1 => Just(Updates::SgdBf16),
        1 => Just(Updates::SgdEightBit),
        1 => Just(Updates::AdamW),
        1 => Just(Updates::Adafactor),
        1 => Just(Updates::Muon),
    ];
    let number = (number, updates);
    let script = prop::collection::vec(call(), 1..7);
    let policies = (prop::bool::weighted(0.2), prop::bool::weighted(0.2));
    (model(), engine(), cut(), number, policies, terms(), script).prop_map(
        |(model, engine, cut, (number, updates), (strict, head), terms, script)| Case {
            model,
            engine,
            cut,
            number,
            updates,
            strict,
            head,
            terms,
            script,
        },
    )
}

impl Case {
    fn bounds(&self) -> (f64, f64) {
        let (part, small) = self.number.bounds();
        // Adafactor and Muon divide by the gradient's own size, and so magnify its rounding errors.
        let magnified = matches!(self.updates, Updates::Adafactor | Updates::Muon);
        (if magnified { part.max(1e-6) } else { part }, small)
    }

    /// Adapts the case to its engine, for example by replacing exact BatchNorms that the engine cannot have.
    pub fn settled(mut self, world: &World) -> Self {
        let meets =
            matches!(self.engine, Engine::Pipeline { replicas: 1, .. }) && world.size() == 1;
        if !meets {
            let deferred = |shape: Shape| match shape {
                Shape::Norm(Policy::Exact) => Shape::Norm(Policy::Deferred),
                other => other,
            };
            replace_shapes(&mut self.model.blocks, &deferred);
        }
        if self.number != Number::F64 {
            // Over a few nearly equal values, a norm magnifies rounding without bounds.
            let by_values =
                [Policy::Deferred, Policy::PerMicroBatch, Policy::Exact, Policy::Foreign];
            let steady = |shape: Shape| match shape {
                Shape::Norm(policy) if by_values.contains(&policy) => Shape::Norm(Policy::Frozen),
                Shape::LayerNorm => Shape::RmsNorm,
                other => other,
            };
            replace_shapes(&mut self.model.blocks, &steady);
        }
        // The plain model keeps its state in f64, and computes in it.
        self.updates = match (self.number, self.updates) {
            (Number::F64, updates) => updates,
            (Number::Bf16, Updates::SgdBf16 | Updates::SgdEightBit) => self.updates,
            _ => Updates::Sgd,
        };
        self.head &= self.engine == Engine::Micro;
        if test_device() != Device::Cpu && self.model.draws() {
            // On a GPU a mask depends on the dtype, and on the device that draws it.
            self.number = Number::F64;
            if matches!(self.engine, Engine::Replicas { .. }) {
                self.engine = Engine::Replicas { count: 1 };
            }
        }
        // A custom list is for one number of micro-batches.
        let has_list = matches!(self.engine, Engine::Pipeline { own_list: Some(_), .. });
        if let (true, Cut::Fixed(count) | Cut::Count(count)) = (has_list, self.cut) {
            self.cut = Cut::Count(count.max(2));
        }
        if world.size() > 1 {
            self.engine = self.engine.over_ranks(self.model.layers().len(), world.size());
            // A rank does not know how the others cut, so the result cannot be predicted.
            let fixed = |cut: Cut| if cut.is_automatic() { Cut::Fixed(2) } else { cut };
            self.cut = fixed(self.cut);
            for call in &mut self.script {
                if let Op::Resize(cut) = &mut call.op {
                    *cut = fixed(*cut);
                }
                // Until the commit, each rank handles its mini-batches and their failures alone.
                if matches!(call.op, Op::Accumulate { .. } | Op::Backward { .. } | Op::Map { .. })
                    && self.engine == Engine::Micro
                {
                    call.fault = call.fault.filter(|_| matches!(call.op, Op::Backward { .. }));
                }
            }
        }
        self
    }
}

/// Replaces layers by others.
fn replace_shapes(blocks: &mut [Block], other: &impl Fn(Shape) -> Shape) {
    for block in blocks {
        match block {
            Block::One(shape) => *shape = other(*shape),
            Block::Skip(inner) => replace_shapes(inner, other),
            Block::Fork { .. } => {}
        }
    }
}

/// Returns the parts of a mini-batch, the last ones empty if there are too few samples.
pub fn dealt(samples: usize, parts: usize) -> Vec<Range<usize>> {
    let mut all = split::by_count(samples, parts).expect("samples");
    all.resize(parts, samples..samples);
    all
}

/// Counts of events, by name.
#[derive(Debug, Default)]
pub struct Counts {
    pub done: BTreeMap<String, usize>,
    pub refused: BTreeMap<String, usize>,
    pub failed: BTreeMap<String, usize>,
}

impl Counts {
    pub fn add(counts: &mut BTreeMap<String, usize>, name: impl Into<String>) {
        *counts.entry(name.into()).or_default() += 1;
    }
}

/// States of the default generators.
struct Generators(Vec<(Device, GeneratorState)>);

impl Generators {
    fn now() -> Self {
        let mut devices = vec![Device::Cpu];
        devices.extend((test_device() != Device::Cpu).then(test_device));
        let state = |device| (device, generator_state(device).expect("state"));
        Self(devices.into_iter().map(state).collect())
    }

    fn restore(&self) {
        for (device, state) in &self.0 {
            set_generator_state(*device, state).expect("state");
        }
    }

    /// Returns the next random numbers without consuming them.
    fn peek() -> Tensor {
        let now = Self::now();
        let drawn = Tensor::rand([4], (Kind::Double, Device::Cpu));
        now.restore();
        drawn
    }
}

/// Both models under one script.
struct Duel<'a> {
    case: &'a Case,
    cut: Cut,
    subject: Box<dyn Subject>,
    plain: Plain,
    /// Uncommitted mini-batches.
    window: Vec<Run>,
    /// States of the generators before the first of them.
    before_window: Option<Generators>,
    rank: usize,
    ranks: usize,
    batches: i64,
}

/// Runs a case; panics at a difference.
pub fn run(case: &Case, world: &World, counts: &mut Counts) {
    tch::manual_seed(7);
    let setup = Setup {
        model: &case.model,
        cut: case.cut,
        kind: case.number.kind(),
        rate: RATE,
        updates: case.updates,
        world,
        strict: case.strict,
        head: case.head,
    };
    let subject = match case.engine.build(&setup) {
        Ok(subject) => subject,
        Err(error) => return Counts::add(&mut counts.refused, format!("build: {}", brief(&error))),
    };
    let plain = Plain::new(&case.model, case.head, test_device(), (case.updates, RATE));
    let mut duel = Duel {
        case,
        cut: case.cut,
        subject,
        plain,
        window: Vec::new(),
        before_window: None,
        rank: world.rank(),
        ranks: world.size(),
        batches: 0,
    };
    duel.begin();
    for (number, call) in case.script.iter().enumerate() {
        if !duel.call(number, call, counts) {
            break;
        }
    }
}

/// Returns the first words of an error, without its numbers.
fn brief(error: &Error) -> String {
    let text: String = error.to_string().chars().filter(|c| !c.is_ascii_digit()).collect();
    text.chars().take(70).collect()
}

/// Outcome of a call.
enum Ended<T> {
    Well(T),
    Refused(Error),
    Panicked,
}

impl Duel<'_> {
    fn begin(&mut self) {
        for (name, value) in self.subject.variables() {
            let first = &self.plain.values[&name];
            tch::no_grad(|| value.shallow_clone().copy_(first));
        }
        let names: Vec<String> =
            self.subject.variables().into_iter().map(|(name, _)| name).collect();
        if self.ranks == 1 {
            assert_eq!(names, self.plain.values.keys().cloned().collect::<Vec<_>>(), "variables");
        }
        self.resync();
        tch::manual_seed(11);
    }

    /// Adopts the engine's values if they are less precise than the plain model's.
    fn resync(&mut self) {
        let sees_all = self.ranks == 1 || self.subject.parts() > 1;
        if self.case.number == Number::F64 || !sees_all || !self.window.is_empty() {
            return;
        }
        // Values of offloaded stages are on the host.
        let wide = |(name, value): (String, Tensor)| {
            (name, value.detach().to_device(test_device()).to_kind(Kind::Double).copy())
        };
        self.plain.values = self.subject.variables().into_iter().map(wide).collect();
        self.plain.gradients = self.subject.gradients().into_iter().map(wide).collect();
    }

    fn loss(&self, nan: Option<i64>) -> LossFn {
        let terms = self.case.terms.clone();
        let head = Mutex::new(self.subject.head());
        Arc::new(move |out: &Tensor, target: &Target| {
            let hit = nan.is_some_and(|sample| target.2.eq(sample).any().int64_value(&[]) != 0);
            let out = if hit { out * f64::NAN } else { out.shallow_clone() };
            let loss = loss_of(&terms, &out, target);
            match &*head.lock().unwrap_or_else(PoisonError::into_inner) {
                Some(head) => loss + head_loss(&out, head, target),
                None => loss,
            }
        })
    }

    fn next_batch(&mut self, samples: usize) -> Samples {
        self.batches += 1;
        Samples::new(&self.case.model, samples, self.batches * 100, self.case.number.kind())
    }

    /// Runs one operation with its fault; returns whether the two models can still be compared.
    fn call(&mut self, number: usize, call: &Call, counts: &mut Counts) -> bool {
        let op = self.fitting(&call.op);
        let fault = call.fault.filter(|_| self.ranks == 1 || !matches!(op, Op::Accumulate { .. }));
        let call = &Call { fault, ..call.clone() };
        let name = format!("{op:?}").split([' ', '(']).next().expect("a name").to_owned();
        let what = format!("call {number}, {op:?} with {:?}", call.fault);
        let before = self.state();
        let generators = Generators::now();
        let drawn = Generators::peek();
        let nan = match call.fault {
            Some(Fault::Nan(sample)) => Some(i64::from(sample)),
            _ => None,
        };
        self.arm(call);
        let ended = self.run_op(&op, nan, &generators, &what);
        self.disarm();
        match ended {
            Ended::Well(()) => {
                Counts::add(&mut counts.done, name);
                self.compare(&what);
                self.resync();
            }
            Ended::Refused(Error::Pipeline(PipelineError::PartlyUpdated { .. })) => {
                assert!(
                    self.subject.updates_in_backward() && call.fault.is_some() && nan.is_none(),
                    "{what}"
                );
                Counts::add(&mut counts.failed, format!("{name}: behind an update"));
                return false;
            }
            Ended::Refused(error) => {
                let kind =
                    if call.fault.is_some() { &mut counts.failed } else { &mut counts.refused };
                Counts::add(kind, format!("{name}: {}", brief(&error)));
                self.unchanged(&what, &before, &drawn, &op, &error.to_string());
            }
            Ended::Panicked => {
                assert!(matches!(call.fault, Some(Fault::Panic(_))), "{what}: a panic");
                Counts::add(&mut counts.failed, format!("{name}: panic"));
                self.unchanged(&what, &before, &drawn, &op, "a panic");
            }
        }
        true
    }

    /// Replaces an operation that is not possible now by one that is.
    fn fitting(&self, op: &Op) -> Op {
        let open = !self.window.is_empty();
        let apart = self.ranks > 1 && self.case.engine == Engine::Micro;
        // Each rank draws its own numbers until the commit.
        let unknown_draws = apart && self.case.model.draws();
        let unknown_cut = self.cut.is_automatic() && self.case.model.shows_cut() || unknown_draws;
        let updates_in_backward = self.subject.updates_in_backward();
        match *op {
            Op::Accumulate { samples } | Op::Whole { samples, .. } if updates_in_backward => {
                Op::Backward { samples }
            }
            Op::Clip(_) if updates_in_backward => Op::ZeroGrad,
            Op::Backward { samples } if open => Op::Accumulate { samples },
            Op::Accumulate { samples } if unknown_cut && !open => Op::Backward { samples },
            Op::Whole { .. } | Op::Freeze(_) | Op::Unfreeze(_) | Op::Resize(_) if open => {
                Op::Commit
            }
            // Statistics that change at every micro-batch have changed before the commit.
            Op::Evaluate { .. } | Op::Map { .. } if open && self.case.model.moves_at_once() => {
                Op::Commit
            }
            Op::Commit if !open => Op::ZeroGrad,
            Op::Whole { samples, .. } if self.ranks > 1 => Op::Backward { samples },
            ref other => other.clone(),
        }
    }

    fn arm(&self, call: &Call) {
        if usize::from(call.rank) % self.ranks != self.rank {
            return;
        }
        match call.fault {
            Some(Fault::Panic(calls)) => set_fuse(i64::from(calls)),
            Some(Fault::Allocation { memory, number }) => {
                let arenas = self.subject.arenas();
                arenas[usize::from(memory) % arenas.len()].fail_nth_allocation(u64::from(number));
            }
            Some(Fault::Nan(_)) | None => {}
        }
    }

    fn disarm(&self) {
        set_fuse(-1);
        self.subject.arenas().iter().for_each(|arena| arena.fail_nth_allocation(0));
    }

    fn run_op(
        &mut self,
        op: &Op,
        nan: Option<i64>,
        generators: &Generators,
        what: &str,
    ) -> Ended<()> {
        match *op {
            Op::Backward { samples } => {
                let (batch, loss) = (self.next_batch(samples), self.loss(nan));
                let reported = ended(|| self.subject.backward(&batch, &loss));
                self.then(reported, |this, reported| {
                    this.check_backward(&batch, &reported, generators, what)
                })
            }
            Op::Accumulate { samples } => {
                let (batch, loss) = (self.next_batch(samples), self.loss(nan));
                let reported = ended(|| self.subject.accumulate(&batch, &loss));
                self.then(reported, |this, out| {
                    this.check_accumulate(&batch, &out, generators, what)
                })
            }
            Op::Commit => {
                let reported = ended(|| self.subject.commit());
                self.then(reported, |this, reported| {
                    let runs = std::mem::take(&mut this.window);
                    this.before_window = None;
                    let loss = this.plain.commit(runs, &this.case.terms);
                    this.near(what, "the loss", reported.loss, loss);
                })
            }
            Op::Whole { samples, leaf, in_two } => {
                self.whole(samples, (leaf, in_two && !leaf), generators, what)
            }
            Op::Evaluate { samples } => {
                let (batch, loss) = (self.next_batch(samples), self.loss(nan));
                let reported = ended(|| self.subject.evaluate(&batch, &loss));
                self.then(reported, |this, reported| {
                    let (loss, outputs) = this.plain.evaluate(&batch, &this.case.terms);
                    generators.restore();
                    this.near(what, "the loss", reported.loss, loss);
                    this.same_outputs(what, &reported.outputs, &outputs, samples);
                })
            }
            Op::Map { samples } => {
                let batch = self.next_batch(samples);
                let reported = ended(|| self.subject.map(&batch));
                self.then(reported, |this, found| {
                    let (_, outputs) = this.plain.evaluate(&batch, &this.case.terms);
                    generators.restore();
                    this.same_outputs(what, &found, &outputs, samples);
                })
            }
            _ => self.run_change(op, what),
        }
    }

    /// Runs an operation that does not run the model.
    fn run_change(&mut self, op: &Op, what: &str) -> Ended<()> {
        let pick = |which: u8, names: &[String]| names[usize::from(which) % names.len()].clone();
        let names = self.plain.trainable();
        match *op {
            Op::Update => {
                let done = ended(|| self.subject.optimizer().step());
                self.then(done, |this, ()| this.plain.update())
            }
            Op::ZeroGrad => {
                let done = ended(|| self.subject.zero_grad());
                self.then(done, |this, ()| this.plain.gradients.clear())
            }
            Op::Clip(max) => {
                let max = 0.01 + f64::from(max) / 64.0;
                let done = ended(|| self.subject.optimizer().clip_gradient_norm(max)?.value());
                self.then(done, |this, norm| {
                    let expected = this.plain.clip(max);
                    this.near(what, "the norm", norm, expected.expect("a gradient"));
                })
            }
            Op::Rate(rate) => {
                let rate = f64::from(rate) / 2560.0;
                let done = ended(|| self.subject.optimizer().set_learning_rate(rate));
                self.then(done, |this, ()| this.plain.rate = rate)
            }
            Op::Freeze(which) | Op::Unfreeze(which) => {
                let freezes = matches!(op, Op::Freeze(_));
                let name = pick(which, &names);
                let done = ended(|| self.subject.set_frozen(&name, freezes));
                self.then(done, |this, ()| match freezes {
                    true => drop(this.plain.frozen.insert(name)),
                    false => drop(this.plain.frozen.remove(&name)),
                })
            }
            Op::Value(which) => {
                let name = pick(which, &names);
                self.set_value(&name, f64::from(which));
                Ended::Well(())
            }
            Op::Gradient(which) => {
                self.halve_gradient(&pick(which, &names));
                Ended::Well(())
            }
            Op::SaveAndLoad => self.save_and_load(),
            Op::Resize(cut) => {
                let done = ended(|| self.subject.set_size(cut));
                self.then(done, |this, ()| this.cut = cut)
            }
            _ => unreachable!("runs the model"),
        }
    }

    fn then<T>(&mut self, ended: Ended<T>, check: impl FnOnce(&mut Self, T)) -> Ended<()> {
        match ended {
            Ended::Well(value) => {
                check(self, value);
                Ended::Well(())
            }
            Ended::Refused(error) => Ended::Refused(error),
            Ended::Panicked => Ended::Panicked,
        }
    }

    fn check_backward(
        &mut self,
        batch: &Samples,
        reported: &Reported,
        from: &Generators,
        what: &str,
    ) {
        let after = Generators::peek();
        let now = Generators::now();
        from.restore();
        let pieces = self.pieces(batch.len(), Some(reported), what);
        let run = self.plain.run_batch(batch, &pieces, &self.case.terms);
        self.same_draws(what, &after);
        now.restore();
        let outputs = run.outputs.shallow_clone();
        let loss = self.plain.commit(vec![run], &self.case.terms);
        if self.subject.updates_in_backward() {
            self.plain.update();
            // A parameter without elements has nothing to offload, and keeps its gradient.
            self.plain.gradients.retain(|_, gradient| gradient.numel() == 0);
        }
        self.near(what, "the loss", reported.loss, loss);
        self.same_outputs(what, &reported.outputs, &outputs, batch.len());
    }

    fn check_accumulate(&mut self, batch: &Samples, found: &Tensor, from: &Generators, what: &str) {
        let after = Generators::peek();
        let now = Generators::now();
        from.restore();
        if self.window.is_empty() {
            self.before_window = Some(Generators::now());
        }
        let pieces = self.pieces(batch.len(), None, what);
        let run = self.plain.run_batch(batch, &pieces, &self.case.terms);
        self.same_draws(what, &after);
        now.restore();
        self.same_outputs(what, found, &run.outputs, batch.len());
        self.window.push(run);
    }

    fn whole(
        &mut self,
        samples: usize,
        (leaf, in_two): (bool, bool),
        from: &Generators,
        what: &str,
    ) -> Ended<()> {
        let batch = self.next_batch(samples);
        let temperature = leaf.then(|| {
            let kind = (self.case.number.kind(), test_device());
            Tensor::full([], 0.7, kind).set_requires_grad(true)
        });
        let own = Mutex::new(temperature.as_ref().map(Tensor::shallow_clone));
        let loss: WholeFn = Arc::new(move |out: &Tensor| {
            let own = own.lock().unwrap_or_else(PoisonError::into_inner);
            whole_loss(out, own.as_ref())
        });
        let reported = ended(|| match in_two {
            true => self.subject.whole_in_two(&batch, &loss),
            false => self.subject.whole(&batch, &loss),
        });
        let refuses = leaf && !self.subject.sums_other_leaves();
        if let Some(temperature) =
            temperature.as_ref().filter(|_| !matches!(reported, Ended::Well(_)))
        {
            assert!(!temperature.grad().defined(), "{what}: a failed step left a leaf's gradient");
        }
        self.then(reported, |this, reported| {
            assert!(!refuses, "{what}: a leaf that is no parameter was not refused");
            let after = Generators::peek();
            let now = Generators::now();
            from.restore();
            let pieces = this.pieces(samples, Some(&reported), what);
            let wide = temperature
                .as_ref()
                .map(|t| t.detach().to_kind(Kind::Double).set_requires_grad(true));
            let (loss, outputs, of_leaf) = this.plain.whole(&batch, &pieces, wide.as_ref());
            this.same_draws(what, &after);
            now.restore();
            this.near(what, "the loss", reported.loss, loss);
            if let (Some(temperature), Some(expected)) = (&temperature, of_leaf) {
                let found = temperature.grad().double_value(&[]);
                this.near(what, "the leaf's gradient", found, expected);
            }
            this.same_outputs(what, &reported.outputs, &outputs, samples);
        })
    }

    fn set_value(&mut self, name: &str, seed: f64) {
        for (other, variable) in self.subject.variables() {
            if other == name {
                let value = numbers(&variable.size(), seed as i64) * 0.5;
                tch::no_grad(|| variable.shallow_clone().copy_(&value));
            }
        }
        let old = &self.plain.values[name];
        let value = numbers(&old.size(), seed as i64) * 0.5;
        self.plain.values.insert(name.to_owned(), value.to_device(test_device()));
    }

    fn halve_gradient(&mut self, name: &str) {
        for (other, gradient) in self.subject.gradients() {
            if other == name {
                tch::no_grad(|| drop(gradient.shallow_clone().g_mul_scalar_(0.5)));
            }
        }
        if let Some(gradient) = self.plain.gradients.get_mut(name) {
            *gradient = &*gradient * 0.5;
        }
    }

    fn save_and_load(&mut self) -> Ended<()> {
        if self.ranks > 1 {
            return Ended::Well(());
        }
        let folder = tempfile::tempdir().expect("a folder");
        let done = ended(|| {
            self.subject.save(folder.path())?;
            for (_, variable) in self.subject.variables() {
                tch::no_grad(|| drop(variable.shallow_clone().fill_(3.0)));
            }
            self.subject.load(folder.path())
        });
        self.then(done, |_, ()| ())
    }

    /// Checks that the next random numbers are those after a plain loop, or after a step that has drawn its seed.
    fn same_draws(&self, what: &str, after: &Tensor) {
        // For engines with seeds, the plain model has seeded the default generator itself.
        if !self.subject.is_seeded() && test_device() == Device::Cpu {
            assert_eq!(*after, Generators::peek(), "{what}: random numbers");
        }
    }

    /// Returns the pieces in which the engine has run a mini-batch, with their random numbers. Expects the default
    /// generator in its state before the engine's step.
    fn pieces(&self, samples: usize, reported: Option<&Reported>, what: &str) -> Vec<Piece> {
        let seed = self.subject.is_seeded().then(|| {
            let before = Generators::now();
            let seed = drawn_seed();
            before.restore();
            seed
        });
        if let Some(reported) = reported {
            assert_eq!(reported.seed, seed, "{what}: the step's seed");
        }
        let mut pieces = Vec::new();
        for (part, rows) in dealt(samples, self.subject.parts()).into_iter().enumerate() {
            let ranges = self.cut_part(part, &rows, reported);
            for (number, range) in ranges.into_iter().enumerate() {
                let draw = match seed {
                    None => Draw::Loop,
                    Some(seed) if self.subject.draws_by_layer() => {
                        Draw::Layers(StepRng::new(seed, pieces.len()))
                    }
                    Some(seed) => Draw::Seed(StepRng::new(seed, number).seed(part)),
                };
                pieces.push(Piece { rows: range, draw, part });
            }
        }
        pieces
    }

    fn cut_part(
        &self,
        part: usize,
        rows: &Range<usize>,
        reported: Option<&Reported>,
    ) -> Vec<Range<usize>> {
        let lengths: Vec<usize> = match (self.cut.size(), reported) {
            _ if rows.is_empty() => Vec::new(),
            (MicroBatches::Samples(size), _) => lengths(split::by_size(rows.len(), size)),
            (MicroBatches::Count(count), _) => lengths(split::by_count(rows.len(), count)),
            (_, Some(reported)) => {
                let mut start = 0;
                let mut skip: usize = reported.shares[..part].iter().sum();
                let all = reported.sizes.iter().filter(|size| {
                    let own = skip == 0 && start < rows.len();
                    if skip > 0 {
                        skip -= **size;
                    } else if own {
                        start += **size;
                    }
                    own
                });
                all.copied().collect()
            }
            // The micro-batch size does not affect the results.
            (_, None) => vec![rows.len()],
        };
        let mut start = rows.start;
        let range = |length: usize| {
            start += length;
            start - length..start
        };
        lengths.into_iter().map(range).collect()
    }

    /// Returns everything that a call may change.
    fn state(&self) -> Named {
        let mut all = copies(&self.subject.variables());
        let gradients = copies(&self.subject.gradients()).into_iter();
        all.extend(gradients.map(|(name, gradient)| (format!("{name} gradient"), gradient)));
        all
    }

    /// Checks that a failed call has changed nothing; a commit drops its window.
    fn unchanged(&mut self, what: &str, before: &Named, drawn: &Tensor, op: &Op, error: &str) {
        let what = format!("{what}, which failed ({error})");
        if *op == Op::Commit {
            self.window.clear();
            if let Some(before) = self.before_window.take() {
                let now = Generators::peek();
                before.restore();
                assert_eq!(now, Generators::peek(), "{what}: random numbers");
            }
        } else {
            assert_eq!(*drawn, Generators::peek(), "{what}: random numbers");
        }
        let after = self.state();
        let names = |all: &Named| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(names(before), names(&after), "{what}");
        for ((name, before), (_, after)) in before.iter().zip(&after) {
            let window = is_statistic(name) && *op == Op::Commit;
            // Statistics that change at every micro-batch changed with the window's first mini-batch.
            assert!(window || before.equal(after), "{what}: {name} has changed");
        }
        if *op == Op::Commit {
            self.compare(&what);
        }
    }

    /// Checks that values and gradients are the plain model's.
    fn compare(&mut self, what: &str) {
        let open = !self.window.is_empty();
        let at_once =
            self.case.model.moves_at_once() && (open || !self.case.engine.runs_in_order());
        let found: Named = self
            .subject
            .variables()
            .into_iter()
            .filter(|(name, _)| !(at_once && is_statistic(name)))
            .collect();
        self.close(&format!("{what}: values"), &found, &self.plain.values);
        if at_once && !open {
            let all = self.subject.variables().into_iter().filter(|(name, _)| is_statistic(name));
            let wide = |(name, t): (String, Tensor)| {
                (name, t.to_device(test_device()).to_kind(Kind::Double).copy())
            };
            self.plain.values.extend(all.map(wide));
        }
        let found = self.subject.gradients();
        if self.ranks == 1 || self.subject.parts() > 1 {
            let names: Vec<_> = found.iter().map(|(name, _)| name).collect();
            assert_eq!(names, self.plain.gradients.keys().collect::<Vec<_>>(), "{what}: gradients");
        }
        self.close(&format!("{what}: gradients"), &found, &self.plain.gradients);
    }

    fn close(&self, what: &str, found: &Named, expected: &Values) {
        let (part, small) = self.case.bounds();
        let of = |(name, _): &(String, Tensor)| match expected.get(name) {
            Some(value) => (name.clone(), value.shallow_clone()),
            None => panic!("{what}: {name} is not the plain model's"),
        };
        let expected: Named = found.iter().map(of).collect();
        assert_near(what, found, &expected, part, small);
    }

    fn near(&self, what: &str, name: &str, found: f64, expected: f64) {
        let value = |number: f64| vec![(name.to_owned(), Tensor::from(number))];
        let (part, small) = self.case.bounds();
        assert_near(what, &value(found), &value(expected), part, small);
    }

    fn same_outputs(&self, what: &str, found: &Tensor, expected: &Tensor, samples: usize) {
        let rows = match self.subject.parts() {
            parts if self.ranks > 1 && parts > 1 => dealt(samples, parts)[self.rank].clone(),
            _ => 0..samples,
        };
        if rows.is_empty() {
            return;
        }
        let expected = expected.narrow(0, rows.start as i64, rows.len() as i64);
        let named = |t: &Tensor| vec![("outputs".to_owned(), t.shallow_clone())];
        let (part, small) = self.case.bounds();
        assert_near(what, &named(found), &named(&expected), part, small);
    }
}

fn lengths(ranges: Result<Vec<Range<usize>>, split::SplitError>) -> Vec<usize> {
    ranges.expect("a cut").iter().map(ExactSizeIterator::len).collect()
}

/// Returns the terms of a micro-batch's loss.
fn loss_of(terms: &Terms, out: &Tensor, target: &Target) -> Loss {
    let one = |(number, (over, factor)): (usize, &(Over, u8))| {
        let (sum, count) = crate::model::term(number, *over, out, target);
        let loss = match over {
            Over::Samples => Loss::mean(sum / count),
            Over::Weights => Loss::mean_over(sum / &count, count),
            Over::Ratio => Loss::ratio(sum, count),
            Over::Nothing => Loss::sum(sum),
        };
        loss * (f64::from(*factor) * 0.25)
    };
    terms.iter().enumerate().map(one).reduce(|a, b| a + b).expect("a term")
}

fn head_loss(out: &Tensor, head: &Tensor, target: &Target) -> Loss {
    let classes = crate::model::classes(target);
    linear_cross_entropy(out, head, None, &classes, Default::default()).expect("a loss")
}

/// Runs a call and returns its outcome.
fn ended<T>(call: impl FnOnce() -> brimful::Result<T>) -> Ended<T> {
    match panic::catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ended::Well(value),
        Ok(Err(error)) => Ended::Refused(error),
        Err(payload) => match words_of(&*payload).as_deref() {
            Some("the layer gives up") => Ended::Panicked,
            _ => panic::resume_unwind(payload),
        },
    }
}
