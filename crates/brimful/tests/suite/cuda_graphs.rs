//! Micro-batches replayed as CUDA graphs give the eager results; those that cannot be captured run eagerly.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0 … -- --test-threads=1` on a GPU. On a CPU everything runs eagerly and must give
//! the same results.

use crate::support::full_batch::{Batch, CLASSES, batch_from, losses, there};
use crate::support::{Named, clear, fill, numbers, test_device, variables};
use brimful::NonFinitePolicy;
use brimful::loss::LossError;
use brimful::nn::{BatchNormConfig, BatchNormPolicy, batch_norm1d};
use brimful::{Error, Loss, MicroBatcher, MicroBatches};
use brimful_torch::autograd::set_gradient;
use brimful_torch::stream::{Event, Stream};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

struct NormedNet {
    store: nn::VarStore,
    layers: nn::SequentialT,
    dropout: f64,
}

impl NormedNet {
    fn new(kind: Kind, policy: BatchNormPolicy, dropout: f64) -> Self {
        let mut store = nn::VarStore::new(test_device());
        let root = store.root();
        let config = BatchNormConfig { policy, ..Default::default() };
        let layers = nn::seq_t()
            .add(nn::linear(&root / "one", 6, 16, Default::default()))
            .add(batch_norm1d(&root / "norm", 16, config))
            .add_fn(Tensor::tanh)
            .add(nn::linear(&root / "two", 16, CLASSES, Default::default()));
        let _unused = root.randn_standard("unused", &[3]);
        store.set_kind(kind);
        fill(&store);
        Self { store, layers, dropout }
    }

    fn plain(kind: Kind) -> Self {
        Self::new(kind, BatchNormPolicy::default(), 0.0)
    }

    fn logits(&self, x: &Tensor) -> Tensor {
        self.layers.forward_t(&x.dropout(self.dropout, true), true)
    }

    /// Mean over samples, a term over tokens, and a penalty.
    fn loss(&self, x: &Tensor, y: &Tensor, tokens: &Tensor) -> Loss {
        let logits = self.logits(x);
        let each = losses(&logits, y);
        let count = tokens.sum(tokens.kind());
        let over_tokens = (&each * tokens).sum(each.kind()) / &count;
        let weight = &self.store.variables()["two.weight"];
        Loss::mean(each.mean(each.kind()))
            + Loss::mean_over(over_tokens, count) * 0.5
            + Loss::once(weight.square().sum(weight.kind()) * 0.01)
    }

    /// Returns every gradient and every variable that is not trained, by name.
    fn state(&self) -> Named {
        let value = |(name, t): (String, Tensor)| {
            let value = if t.requires_grad() { t.grad() } else { t };
            value.defined().then(|| (name, value.copy()))
        };
        variables(&self.store).into_iter().filter_map(value).collect()
    }
}

fn assert_near(kind: Kind, got: &NormedNet, expected: &NormedNet, what: &str) {
    let tolerance = match kind {
        Kind::Double => 1e-11,
        Kind::Float => 1e-5,
        _ => 2e-2,
    };
    crate::support::assert_near(what, &got.state(), &expected.state(), tolerance, 0.1);
}

fn replays() -> bool {
    test_device().is_cuda()
}

/// Makes the same model twice, to run eagerly and with CUDA graphs in micro-batches of this size.
fn pair(size: usize, net: impl Fn() -> NormedNet) -> ([NormedNet; 2], MicroBatcher, MicroBatcher) {
    let nets = [net(), net()];
    let [one, two] =
        nets.each_ref().map(|net| MicroBatcher::new(&net.store, MicroBatches::Samples(size)));
    (nets, one, two.cuda_graphs(true))
}

/// Runs both over the same mini-batches and compares after each.
fn side_by_side(kind: Kind, policy: BatchNormPolicy, dropout: f64, lengths: &[i64]) {
    let ([eager, replayed], mut one, mut two) = pair(4, || NormedNet::new(kind, policy, dropout));
    let mut count = 0;
    for (step, &length) in lengths.iter().enumerate() {
        let samples = batch_from(length, kind, step as i64);
        let run = |micro: &mut MicroBatcher, net: &NormedNet| {
            tch::manual_seed(step as i64);
            let closure = |(x, y, tokens): Batch| (net.loss(&x, &y, &tokens), net.logits(&x));
            micro.backward(&samples, closure).expect("a step")
        };
        let (one, two) = (run(&mut one, &eager), run(&mut two, &replayed));
        let what = format!("{kind:?} {policy:?} step {step} of {length}");
        assert_near(kind, &replayed, &eager, &what);
        let outputs = (&one.outputs - &two.outputs).abs().max().double_value(&[]);
        let tolerance = if kind == Kind::Double { 1e-11 } else { 2e-2 };
        assert!(outputs < tolerance, "{what}: outputs off by {outputs:e}");
        for (a, b) in one.terms.iter().zip(&two.terms) {
            assert!((a - b).abs() <= tolerance * a.abs(), "{what}: {a} and {b}");
        }
        assert_eq!((one.replayed, one.sizes), (0, two.sizes));
        count += two.replayed;
        if step % 2 == 1 {
            clear(&eager.store);
            clear(&replayed.store);
        }
    }
    assert_eq!(two.eager_cause().is_none(), replays(), "{:?}", two.eager_cause());
    assert_eq!(count > 0, replays());
}

#[test]
fn replayed_steps_are_the_eager_ones() {
    // Sizes of 4; of 4 and 3; fewer micro-batches; a single one.
    let lengths = [24, 24, 23, 23, 23, 24, 7, 4, 23];
    for policy in [BatchNormPolicy::Deferred, BatchNormPolicy::PerMicroBatch] {
        side_by_side(Kind::Double, policy, 0.0, &lengths);
    }
    side_by_side(Kind::Float, BatchNormPolicy::Frozen, 0.0, &lengths);
    side_by_side(Kind::BFloat16, BatchNormPolicy::Deferred, 0.0, &[24, 24, 23]);
}

#[test]
fn dropout_draws_the_masks_of_an_eager_step() {
    side_by_side(Kind::Double, BatchNormPolicy::Deferred, 0.5, &[24, 24, 23, 23, 23]);
}

#[test]
fn windows_of_several_mini_batches_come_to_the_same() {
    let kind = Kind::Double;
    let ([eager, replayed], mut one, mut two) = pair(4, || NormedNet::plain(kind));
    for window in 0..3 {
        let run = |micro: &mut MicroBatcher, net: &NormedNet| {
            for part in 0..3 {
                let samples = batch_from(20 + part, kind, window * 10 + part);
                let closure = |(x, y, tokens): Batch| net.loss(&x, &y, &tokens);
                micro.accumulate(&samples, closure).expect("a part");
            }
            micro.commit().expect("a step")
        };
        let (a, b) = (run(&mut one, &eager), run(&mut two, &replayed));
        assert!((a.loss - b.loss).abs() < 1e-12, "{} {}", a.loss, b.loss);
        assert_near(kind, &replayed, &eager, &format!("window {window}"));
        assert_eq!(b.replayed > 0, replays(), "{:?}", two.eager_cause());
    }
}

#[test]
fn parameters_that_are_frozen_or_thawed_are_noticed() {
    let kind = Kind::Double;
    let ([eager, replayed], mut one, mut two) = pair(4, || NormedNet::plain(kind));
    for step in 0..6 {
        let frozen = step / 2 == 1;
        let run = |micro: &mut MicroBatcher, net: &NormedNet| {
            clear(&net.store);
            let weight = net.store.variables()["one.weight"].shallow_clone();
            let _ = weight.set_requires_grad(!frozen);
            let samples = batch_from(24, kind, step);
            micro.backward(&samples, |(x, y, t): Batch| net.loss(&x, &y, &t)).expect("a step")
        };
        let (_, b) = (run(&mut one, &eager), run(&mut two, &replayed));
        assert_near(kind, &replayed, &eager, &format!("step {step}"));
        assert_eq!(b.replayed > 0, replays(), "{:?}", two.eager_cause());
    }
}

/// Factor of a model that belongs to no store.
fn factor() -> Tensor {
    Tensor::full([6], 0.7, (Kind::Double, test_device()))
}

/// The gradient is first wanted in a step that does not check captured work. The capture is in the first step, and
/// checks run 1, 2, 4 and 8 steps later.
#[test]
fn leaves_outside_the_store_that_begin_to_want_a_gradient_get_it() {
    let kind = Kind::Double;
    const BEGINS: i64 = 6;
    for of_batch in [true, false] {
        let ([eager, replayed], mut one, mut two) = pair(4, || NormedNet::plain(kind));
        let factors = [factor(), factor()];
        for step in 0..=BEGINS {
            let wants = step == BEGINS;
            let run = |micro: &mut MicroBatcher, net: &NormedNet, factor: &Tensor| {
                let (x, y, tokens) = there(&batch_from(24, kind, step));
                let leaf = if of_batch { &x } else { factor }.set_requires_grad(wants);
                let closure = |(x, y, t): Batch| net.loss(&(x * factor), &y, &t);
                let step = micro.backward(&(x, y, tokens), closure).expect("a step");
                (leaf.grad(), step.replayed)
            };
            let (expected, _) = run(&mut one, &eager, &factors[0]);
            let (found, count) = run(&mut two, &replayed, &factors[1]);
            assert_near(kind, &replayed, &eager, &format!("step {step}, {of_batch}"));
            assert_eq!(count > 0, replays() && !wants, "step {step}: {:?}", two.eager_cause());
            assert_eq!((expected.defined(), found.defined()), (wants, wants), "step {step}");
            if wants {
                let off = (found - expected).abs().max().double_value(&[]);
                assert!(off < 1e-11, "off by {off}");
            }
        }
    }
}

/// State that closures use from outside: a count of calls, and a tensor. The tensor is ready before any step,
/// because another stream would not wait for it.
struct Outside {
    calls: i32,
    one: Tensor,
}

impl Outside {
    fn new() -> Self {
        let one = Tensor::ones([], (Kind::Double, test_device()));
        Stream::current(test_device()).and_then(Stream::synchronize).expect("a tensor");
        Self { calls: 0, one }
    }
}

/// Closure that cannot be captured: its name, and a word of the cause.
type Uncapturable = (&'static str, &'static str, fn(&NormedNet, Batch, &mut Outside) -> Loss);

const UNCAPTURABLE: [Uncapturable; 8] = [
    ("reads a value", "captur", |net, (x, y, tokens), _| {
        assert!(x.sum(Kind::Double).double_value(&[]).is_finite());
        net.loss(&x, &y, &tokens)
    }),
    ("branches on data", "captur", |net, (x, y, tokens), _| {
        let positive = x.sum(Kind::Double).double_value(&[]) > 0.0;
        net.loss(&x, &y, &tokens) * if positive { 2.0 } else { 1.0 }
    }),
    ("has a shape that depends on data", "captur", |net, (x, y, tokens), _| {
        let rows = x.select(1, 0).nonzero().size()[0];
        net.loss(&x, &y, &tokens) * (1.0 + rows as f64)
    }),
    ("copies from the host", "captur", |net, (x, y, tokens), _| {
        let ones = Tensor::ones([1], (Kind::Double, Device::Cpu));
        net.loss(&(x * ones.to_device(test_device())), &y, &tokens)
    }),
    ("reads a value in its backward", "captur", |net, (x, y, tokens), _| {
        // The slope of a product checks for zero factors; other gradients exist by then.
        let weight = &net.store.variables()["one.weight"];
        let x = (x * weight.mean(Kind::Double) + 1.0).cumprod(1, Kind::Double);
        net.loss(&x, &y, &tokens)
    }),
    ("works on another stream", "", |net, (x, y, tokens), outside| {
        let device = x.device();
        let other = Stream::new(device).expect("a stream");
        let inside = other.enter().expect("entered");
        let two = &outside.one * 2.0;
        drop(inside);
        let done = Event::after(other).expect("an event");
        Stream::current(device).and_then(|stream| stream.wait(&done)).expect("waiting");
        net.loss(&(x * two), &y, &tokens)
    }),
    ("counts its calls", "replay", |net, (x, y, tokens), outside| {
        outside.calls += 1;
        net.loss(&x, &y, &tokens) * (1.0 + f64::from(outside.calls % 5))
    }),
    ("draws random numbers on the host", "host", |net, (x, y, tokens), _| {
        let drawn = Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]);
        net.loss(&x, &y, &tokens) * (1.0 + drawn)
    }),
];

#[test]
fn what_cannot_be_replayed_runs_eagerly_with_the_cause() {
    for (name, word, run) in UNCAPTURABLE {
        let kind = Kind::Double;
        let ([eager, replayed], mut one, mut two) = pair(4, || NormedNet::plain(kind));
        let [mut first, mut second] = [(); 2].map(|()| Outside::new());
        // A closure that counts its calls is called once more for the capture, and then behaves differently.
        let compared = name != "counts its calls";
        for step in 0..3 {
            let samples = there(&batch_from(24, kind, step));
            tch::manual_seed(step);
            let a = one.backward(&samples, |s: Batch| run(&eager, s, &mut first)).expect("a step");
            tch::manual_seed(step);
            let b =
                two.backward(&samples, |s: Batch| run(&replayed, s, &mut second)).expect("a step");
            assert_eq!(b.replayed, 0, "{name}");
            if compared {
                assert!((a.loss - b.loss).abs() < 1e-11, "{name}: {} {}", a.loss, b.loss);
                assert_near(kind, &replayed, &eager, name);
            }
        }
        let cause = two.eager_cause().expect(name).to_owned();
        if replays() {
            assert!(cause.contains(word), "{name}: {cause}");
        }
        // The device stays usable: another micro-batcher captures.
        let net = NormedNet::plain(kind);
        let mut micro = MicroBatcher::new(&net.store, MicroBatches::Samples(4)).cuda_graphs(true);
        let step =
            micro.backward(&batch_from(24, kind, 0), |(x, y, t): Batch| net.loss(&x, &y, &t));
        assert_eq!(step.expect("a step").replayed > 0, replays(), "after: {name}");
    }
}

#[test]
fn a_loss_that_is_not_finite_is_refused_and_the_next_step_is_right() {
    let kind = Kind::Double;
    for policy in [NonFinitePolicy::RefuseLoss, NonFinitePolicy::RefuseGradients] {
        let ([eager, replayed], mut one, two) = pair(4, || NormedNet::plain(kind));
        let mut two = two.non_finite(policy);
        for step in 0..4 {
            let samples = batch_from(24, kind, step);
            if step % 2 == 1 {
                let before = replayed.state();
                let (x, y, tokens) = batch_from(24, kind, step);
                let _ = x.narrow(0, 14, 1).fill_(f64::NAN);
                let closure = |(x, y, t): Batch| replayed.loss(&x, &y, &t);
                let error = two.backward(&(x, y, tokens), closure).expect_err("not a number");
                assert!(
                    matches!(error, Error::Loss(LossError::NonFinite { micro_batch: 3, .. })),
                    "{error}"
                );
                assert_eq!(before, replayed.state());
            }
            one.backward(&samples, |(x, y, t): Batch| eager.loss(&x, &y, &t)).expect("a step");
            let step = two.backward(&samples, |(x, y, t): Batch| replayed.loss(&x, &y, &t));
            let count = step.expect("a step").replayed;
            assert_eq!(count > 0, replays(), "{:?}", two.eager_cause());
            assert_near(kind, &replayed, &eager, "after a refusal");
        }
    }
}

#[test]
fn out_of_memory_frees_what_was_captured_and_the_next_step_is_right() {
    let kind = Kind::Double;
    let ([eager, replayed], mut one, mut two) = pair(8, || NormedNet::plain(kind));
    let closure = |net: &NormedNet, (x, y, tokens): Batch| {
        // Only micro-batches of 5 ask for 16 TiB.
        if x.size()[0] == 5 {
            let _ = Tensor::zeros([1 << 41], (Kind::Double, x.device()));
        }
        net.loss(&x, &y, &tokens)
    };
    for step in 0..4 {
        let samples = batch_from(40, kind, step);
        one.backward(&samples, |s: Batch| closure(&eager, s)).expect("a step");
        let b = two.backward(&samples, |s: Batch| closure(&replayed, s)).expect("a step");
        assert_eq!(b.replayed > 0, replays(), "{:?}", two.eager_cause());
        assert_near(kind, &replayed, &eager, &format!("step {step}"));
        if step == 1 {
            let ragged = batch_from(5, kind, 9);
            let error = two.backward(&ragged, |s: Batch| closure(&replayed, s));
            assert!(matches!(error, Err(Error::OutOfMemory(_))), "{error:?}");
        }
    }
}

#[test]
fn an_automatic_size_backs_off_and_is_replayed() {
    let kind = Kind::Double;
    for size in [MicroBatches::Auto, MicroBatches::Largest] {
        // Without normalisation, whose results depend on the size.
        let [eager, replayed] =
            [(); 2].map(|()| NormedNet::new(kind, BatchNormPolicy::Frozen, 0.0));
        let mut one = MicroBatcher::new(&eager.store, MicroBatches::Samples(4));
        let mut two = MicroBatcher::new(&replayed.store, size).cuda_graphs(true);
        let (mut retries, mut count) = (0, 0);
        for step in 0..6 {
            let samples = batch_from(60, kind, step);
            one.backward(&samples, |(x, y, t): Batch| eager.loss(&x, &y, &t)).expect("a step");
            let closure = |(x, y, tokens): Batch| {
                // More than 7 samples ask for 16 TiB.
                if x.size()[0] > 7 {
                    let _ = Tensor::zeros([1 << 41], (Kind::Double, x.device()));
                }
                replayed.loss(&x, &y, &tokens)
            };
            let b = two.backward(&samples, closure).expect("a step");
            assert!(b.sizes.iter().all(|size| *size <= 7), "{:?}", b.sizes);
            assert_near(kind, &replayed, &eager, &format!("{size:?} step {step}"));
            (retries, count) = (retries + b.retries, count + b.replayed);
        }
        assert!(retries > 0);
        assert_eq!(count > 0, replays(), "{:?}", two.eager_cause());
    }
}

#[test]
fn a_thousand_steps_take_no_more_memory_than_a_hundred() {
    let device = test_device();
    let net = NormedNet::new(Kind::Float, BatchNormPolicy::Deferred, 0.1);
    let mut micro = MicroBatcher::new(&net.store, MicroBatches::Samples(4)).cuda_graphs(true);
    let (mut early, steps) = (None, if replays() { 1000 } else { 20 });
    for step in 0..steps {
        let samples = batch_from(if step % 7 == 0 { 23 } else { 24 }, Kind::Float, step % 10);
        micro.backward(&samples, |(x, y, t): Batch| net.loss(&x, &y, &t)).expect("a step");
        clear(&net.store);
        if replays() && (step == 100 || step == steps - 1) {
            let now = brimful_torch::memory::device_memory(device).expect("figures");
            let (current, reserved) = early.get_or_insert((now.current, now.reserved));
            assert!(now.current <= *current && now.reserved <= *reserved, "{now:?}");
        }
    }
}

/// Runs steps of two groups with changing rates, on gradients that stay at the same addresses.
fn stepped(
    kind: Kind,
    method: impl Fn(f64) -> brimful::optim::Method,
    cuda_graphs: bool,
) -> (Vec<Tensor>, usize) {
    let NormedNet { store, .. } = NormedNet::plain(kind);
    let mut optimizer = brimful::optim::Optimizer::new(&store, method(0.1)).expect("an optimizer");
    optimizer.group("biases", |name| name.ends_with("bias"), method(0.05)).expect("a group");
    let mut optimizer = optimizer.cuda_graphs(cuda_graphs);
    let mut parameters = store.trainable_variables();
    parameters.retain(|p| p.size() != [3]);
    let gradients: Vec<Tensor> = parameters.iter().map(Tensor::zeros_like).collect();
    for step in 0..8 {
        for (parameter, gradient) in parameters.iter_mut().zip(&gradients) {
            let values = numbers(&parameter.size(), step);
            tch::no_grad(|| gradient.shallow_clone().copy_(&values));
            set_gradient(parameter, Some(gradient)).expect("a gradient");
        }
        optimizer.set_learning_rate(0.1 / (step + 1) as f64).expect("a rate");
        optimizer.set_group_learning_rate("biases", 0.02).expect("a rate");
        optimizer.step().expect("a step");
        if step == 6 {
            // Other code's writes count.
            let values = numbers(&parameters[0].size(), 99);
            tch::no_grad(|| parameters[0].copy_(&values));
        }
    }
    let values = parameters.iter().map(|p| p.to_kind(Kind::Double).to_device(Device::Cpu));
    (values.collect(), optimizer.replayed())
}

#[test]
fn replayed_optimizer_steps_are_the_steps() {
    use brimful::optim::{Adam, AdamW, Method, Sgd};
    let methods: [fn(f64) -> Method; 3] = [
        |rate| Sgd::new(rate).momentum(0.9).weight_decay(0.01).into(),
        |rate| Adam::new(rate).into(),
        |rate| AdamW::new(rate).into(),
    ];
    for (number, method) in methods.into_iter().enumerate() {
        for (kind, tolerance) in [(Kind::Double, 1e-6), (Kind::Float, 1e-5), (Kind::BFloat16, 2e-2)]
        {
            let (expected, none) = stepped(kind, method, false);
            let (got, replayed) = stepped(kind, method, true);
            for (a, b) in got.iter().zip(&expected) {
                let off = (a - b).abs().max().double_value(&[]);
                assert!(off <= tolerance, "method {number}, {kind:?}: off by {off}");
            }
            let possible = if test_device().is_cuda() { 4..=5 } else { 0..=0 };
            assert!(none == 0 && possible.contains(&replayed), "{kind:?}: {replayed} replayed");
        }
    }
}
