//! A head's chunked loss equals the cross-entropy of its logits: value, gradients, memory, errors.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU.

use crate::support::{
    Named, assert_all_within, assert_fails, assert_same, micro_batcher, near, numbers,
    numbers_there, test_device,
};
use brimful::memory::{Arena, Memory};
use brimful::nn::{LinearCrossEntropyConfig, NnError, linear_cross_entropy};
use brimful::{Bytes, Error, MicroBatcher, MicroBatches};
use brimful_torch::autograd::{backward, set_gradient};
use brimful_torch::linear_cross_entropy::{self as torch, LossHead, SumAndDivisor};
use tch::nn::VarStore;
use tch::{Device, Kind, Reduction, Tensor};

const PADDING: i64 = -1;
const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Inputs of the loss, in f64 and in host memory.
struct Problem {
    name: String,
    hidden: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    class_weights: Option<Tensor>,
    targets: Tensor,
    smoothing: f64,
}

impl Problem {
    fn new(places: &[i64], width: i64, classes: i64) -> Self {
        let count = places.iter().product::<i64>();
        let shape = [places, &[width]].concat();
        let targets = (numbers(&[count], 31) * 1e4).remainder(classes as f64).to_kind(Kind::Int64);
        Self {
            name: format!("places {places:?}, width {width}, classes {classes}"),
            hidden: numbers(&shape, 1),
            weight: numbers(&[classes, width], 2) * 2.0,
            bias: None,
            class_weights: None,
            targets: targets.view(places),
            smoothing: 0.0,
        }
    }

    fn with_everything(mut self) -> Self {
        let classes = self.weight.size()[0];
        self.bias = Some(numbers(&[classes], 3));
        self.class_weights = Some(numbers(&[classes], 4).abs() + 0.1);
        self.smoothing = 0.1;
        // Every third position is padding.
        let every = Tensor::arange(self.targets.numel() as i64, (Kind::Int64, Device::Cpu));
        let padding = every.remainder(3).eq(1).view_as(&self.targets);
        let _ = self.targets.masked_fill_(&padding, PADDING);
        self.name += ", bias, class weights, smoothing, padding";
        self
    }

    /// Rounds the inputs to this dtype.
    fn rounded_to(mut self, kind: Kind) -> Self {
        let round = |t: &Tensor| t.to_kind(kind).to_kind(Kind::Double);
        self.hidden = round(&self.hidden);
        self.weight = round(&self.weight);
        self.bias = self.bias.as_ref().map(round);
        self.name += &format!(", {kind:?}");
        self
    }

    /// Returns the mean over counted targets and its gradients, by libtorch's own operations in f64.
    fn expected(&self) -> Named {
        let leaf = |t: &Tensor| t.copy().set_requires_grad(true);
        let (hidden, weight) = (leaf(&self.hidden), leaf(&self.weight));
        let bias = self.bias.as_ref().map(leaf);
        let logits = hidden.linear(&weight, bias.as_ref()).view([-1, weight.size()[0]]);
        let weights = self.class_weights.as_ref();
        let (targets, smoothing) = (self.targets.view([-1]), self.smoothing);
        let loss =
            logits.cross_entropy_loss(&targets, weights, Reduction::Mean, PADDING, smoothing);
        loss.backward();
        answer(&loss, &hidden, &weight, bias.as_ref())
    }

    fn found(&self, kind: Kind, chunk_bytes: u64) -> Named {
        let there = |t: &Tensor| t.to_device(test_device()).to_kind(kind);
        let leaf = |t: &Tensor| there(t).copy().set_requires_grad(true);
        let (hidden, weight) = (leaf(&self.hidden), leaf(&self.weight));
        let bias = self.bias.as_ref().map(leaf);
        let class_weights = self.class_weights.as_ref().map(there);
        let head = LossHead {
            weight: &weight,
            bias: bias.as_ref(),
            class_weights: class_weights.as_ref(),
            smoothing: self.smoothing,
            ignored: PADDING,
            chunk_bytes,
        };
        let targets = self.targets.to_device(test_device());
        let SumAndDivisor { sum, divisor } =
            torch::linear_cross_entropy(&hidden, &targets, head).expect("a loss");
        // As a step does: the root gradient contains the divisor.
        let root = divisor.reciprocal().to_kind(sum.kind());
        backward(&[&sum], &[Some(&root)], false).expect("gradients");
        answer(&(&sum / &divisor), &hidden, &weight, bias.as_ref())
    }
}

/// Returns the mean loss, and the gradients of hidden states, weight and bias.
fn answer(loss: &Tensor, hidden: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Named {
    let mut all = vec![
        ("loss", loss.detach()),
        ("gradient of hidden", hidden.grad()),
        ("gradient of weight", weight.grad()),
    ];
    all.extend(bias.map(|bias| ("gradient of bias", bias.grad())));
    let host = |t: Tensor| t.to_device(Device::Cpu).to_kind(Kind::Double);
    all.into_iter().map(|(name, t)| (name.to_owned(), host(t))).collect()
}

fn problems() -> Vec<Problem> {
    let shapes: [(&[i64], i64, i64); 8] = [
        (&[1], 1, 1),
        (&[7], 5, 2),
        (&[65], 9, 101),
        (&[3, 11], 4, 17),
        (&[2, 3, 5], 8, 64),
        (&[], 6, 33),
        (&[130], 3, 1031),
        (&[3], 16, 50_257),
    ];
    let make = |(places, width, classes)| {
        let plain = Problem::new(places, width, classes);
        [plain, Problem::new(places, width, classes).with_everything()]
    };
    // A scalar has a single position, which is not padding.
    shapes.into_iter().flat_map(make).collect()
}

/// One position per chunk, a few, and all.
fn chunks(problem: &Problem) -> [u64; 3] {
    let row = problem.weight.size()[0] as u64 * 8;
    [1, row * 5, row * 10_000]
}

#[test]
fn it_is_the_cross_entropy_of_the_logits_as_near_as_a_kind_has_digits() {
    // A chunk of one position is a product with a vector, which a CPU sums sequentially: libtorch's own loss of
    // one position is also off by 2.4e-5 in f32.
    for (kind, part) in
        [(Kind::Double, 1e-10), (Kind::Float, 5e-5), (Kind::BFloat16, 5e-2), (Kind::Half, 1e-2)]
    {
        for problem in problems() {
            let problem = problem.rounded_to(kind);
            let expected = problem.expected();
            for chunk in chunks(&problem) {
                let what = format!("{}, chunks of {chunk} bytes", problem.name);
                near(&what, &problem.found(kind, chunk), &expected, part);
            }
        }
    }
}

#[test]
fn two_runs_are_equal_to_the_last_bit() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let problem = Problem::new(&[130], 33, 1031).with_everything();
        let (one, two) = (problem.found(kind, 50_000), problem.found(kind, 50_000));
        assert_same(&format!("{kind:?}"), &one, &two);
    }
}

/// Compares with central differences in f64.
#[test]
fn its_gradients_are_those_of_small_differences() {
    let problem = Problem::new(&[5], 3, 7).with_everything();
    let found = problem.found(Kind::Double, 100);
    let value = |problem: &Problem| problem.found(Kind::Double, 100)[0].1.double_value(&[]);
    let step = 1e-5;
    for at in 0..15 {
        let moved = |by: f64| {
            let mut moved = Problem::new(&[5], 3, 7).with_everything();
            let change = Tensor::zeros([15], (Kind::Double, Device::Cpu));
            let _ = change.get(at).fill_(by);
            moved.hidden = &moved.hidden + change.view([5, 3]);
            value(&moved)
        };
        let slope = (moved(step) - moved(-step)) / (2.0 * step);
        let gradient = found[1].1.reshape([-1]).double_value(&[at]);
        assert!((slope - gradient).abs() < 1e-8, "element {at}: {gradient}, by steps {slope}");
    }
}

#[test]
fn infinities_and_nan_are_as_libtorch_has_them() {
    let mut masked = Problem::new(&[6], 4, 9);
    let mut bias = vec![0.0; 9];
    bias[5] = f64::NEG_INFINITY;
    masked.bias = Some(Tensor::from_slice(&bias));
    masked.targets = Tensor::from_slice(&[0_i64, 1, 2, 3, 4, 6]);
    masked.name = "a class at minus infinity".into();
    near(&masked.name, &masked.found(Kind::Double, 200), &masked.expected(), 1e-10);
    near(&masked.name, &masked.found(Kind::Float, 200), &masked.expected(), 1e-5);

    let mut huge = Problem::new(&[6], 4, 9);
    huge.bias = Some(numbers(&[9], 8) + 1e4);
    huge.name = "logits near 1e4".into();
    near(&huge.name, &huge.found(Kind::Double, 200), &huge.expected(), 1e-9);

    for bad in [f64::NAN, f64::INFINITY] {
        let problem = Problem::new(&[6], 4, 9);
        let _ = problem.hidden.get(2).fill_(bad);
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
            let loss = problem.found(kind, 200)[0].1.double_value(&[]);
            assert!(loss.is_nan(), "{bad} in a hidden state, {kind:?}: {loss}");
        }
    }
}

#[test]
fn strided_and_offset_tensors_are_taken_as_they_are() {
    let problem = Problem::new(&[4, 6], 5, 13);
    let plain = problem.found(Kind::Double, 200);
    let mut strided = Problem::new(&[4, 6], 5, 13);
    strided.hidden = strided.hidden.transpose(0, 1).contiguous().transpose(0, 1);
    strided.weight = Tensor::cat(&[&strided.weight, &strided.weight], 0).narrow(0, 13, 13);
    strided.targets = strided.targets.transpose(0, 1).contiguous().transpose(0, 1);
    near("strided", &strided.found(Kind::Double, 200), &plain, 1e-12);
}

/// Hidden states of four positions, and the weight of five classes.
fn leaves() -> [Tensor; 2] {
    [(4, 1), (5, 2)].map(|(rows, seed)| numbers_there(&[rows, 3], seed).set_requires_grad(true))
}

#[test]
fn padding_alone_is_a_sum_and_a_divisor_of_nothing() {
    let [hidden, weight] = leaves();
    let targets = Tensor::full([4], PADDING, (Kind::Int64, test_device()));
    let done = torch::linear_cross_entropy(&hidden, &targets, head(&weight)).expect("a loss");
    assert_eq!(done.sum.double_value(&[]), 0.0);
    assert_eq!(done.divisor.double_value(&[]), 0.0);
    done.sum.backward();
    assert_eq!(hidden.grad().abs().max().double_value(&[]), 0.0);
    assert_eq!(weight.grad().abs().max().double_value(&[]), 0.0);
}

fn head(weight: &Tensor) -> LossHead<'_> {
    let (bias, class_weights) = (None, None);
    LossHead { weight, bias, class_weights, smoothing: 0.0, ignored: PADDING, chunk_bytes: 100 }
}

#[test]
fn a_kept_graph_gives_its_gradients_again_and_one_that_is_not_says_so() {
    let [hidden, weight] = leaves();
    let targets = Tensor::from_slice(&[0_i64, 4, 2, 1]).to_device(test_device());
    let done = torch::linear_cross_entropy(&hidden, &targets, head(&weight)).expect("a loss");
    backward(&[&done.sum], &[None], true).expect("gradients");
    let once = weight.grad().copy();
    backward(&[&done.sum], &[None], false).expect("gradients");
    assert_eq!(weight.grad(), &once * 2.0);
    let error = backward(&[&done.sum], &[None], false).expect_err("given away");
    assert!(error.message.contains("backward through the graph a second time"), "{error}");
}

#[test]
fn only_what_is_asked_for_gets_a_gradient() {
    let [mut hidden, weight] = leaves();
    let weight = weight.detach();
    let targets = Tensor::from_slice(&[0_i64, 4, 2, 1]).to_device(test_device());
    let done = torch::linear_cross_entropy(&hidden, &targets, head(&weight)).expect("a loss");
    done.sum.backward();
    assert!(hidden.grad().defined() && !weight.grad().defined());
    set_gradient(&mut hidden, None).expect("no gradient");
    let silent = tch::no_grad(|| torch::linear_cross_entropy(&hidden, &targets, head(&weight)));
    let silent = silent.expect("a loss").sum;
    assert!(!silent.requires_grad());
    assert_eq!(silent, done.sum.detach());
}

/// Few logits, whose gradient is kept for the backward, and more of them, which are chunked.
#[test]
fn in_micro_batches_a_tied_head_has_the_gradient_of_the_whole_batch() {
    let step = |kind: Kind, size, chunk| {
        let mut store = VarStore::new(test_device());
        let table = store.root().zeros("table", &[23, 6]);
        store.set_kind(kind);
        let mut table = store.variables().remove("table").unwrap_or(table);
        tch::no_grad(|| table.copy_(&numbers(&[23, 6], 5).to_kind(Kind::BFloat16)));
        let tokens = (numbers(&[10, 9], 7) * 1e4).remainder(23.0).to_kind(Kind::Int64);
        let mut micro = micro_batcher(&store, MicroBatches::Samples(size));
        let step = micro.backward(&tokens, |tokens| {
            let hidden = Tensor::embedding(&table, &tokens.narrow(1, 0, 8), -1, false, false);
            let config = LinearCrossEntropyConfig { ignored: 3, chunk, ..Default::default() };
            linear_cross_entropy(&hidden, &table, None, &tokens.narrow(1, 1, 8), config)
        });
        (step.expect("a step").loss, table.grad())
    };
    let (loss, gradient) = step(Kind::Double, 10, None);
    for (kind, part) in
        [(Kind::Double, 1e-10), (Kind::Float, 1e-5), (Kind::BFloat16, 3e-2), (Kind::Half, 4e-3)]
    {
        for (size, chunk) in [(1, None), (2, None), (7, None), (2, Some(Bytes(1))), (10, None)] {
            let (other_loss, other) = step(kind, size, chunk);
            let what = format!("{kind:?}, micro-batches of {size}, chunks of {chunk:?}");
            assert!((loss - other_loss).abs() < part * loss, "{what}: {loss}, {other_loss}");
            assert_all_within(&other, &gradient, part, &what);
        }
    }
}

/// On a CPU, on which every byte is counted.
#[test]
fn its_peak_is_below_the_logits_by_far() {
    let hidden = Tensor::randn([512, 8], CPU).set_requires_grad(true);
    let weight = Tensor::randn([4096, 8], CPU).set_requires_grad(true);
    let targets = Tensor::randint(4096, [512], (Kind::Int64, Device::Cpu));
    let logits = 512 * 4096 * 4;
    let arena = Arena::new("loss");
    let _inside = arena.enter();
    let config = LinearCrossEntropyConfig { chunk: Some(Bytes(logits / 16)), ..Default::default() };
    let before = arena.current();
    let loss = linear_cross_entropy(&hidden, &weight, None, &targets, config).expect("a loss");
    let peak = arena.peak() - before;
    assert!(peak < logits / 8, "a peak of {peak} bytes, where logits take {logits}");
    drop(loss);
    arena.reset_peak();
    let plain = hidden.linear(&weight, None::<&Tensor>).cross_entropy_for_logits(&targets);
    plain.backward();
    assert!(arena.peak() > 2 * logits, "plain: {}", arena.peak());
}

/// Returns the gradient of a head's weight, with this many bytes allocated beside it.
fn gradient_beside(bytes: i64) -> Tensor {
    let device = test_device();
    let _other = Tensor::zeros([bytes], (Kind::Uint8, device));
    // More logits than fit into a chunk on a GPU: 412 MB.
    let (tokens, classes) = if device.is_cuda() { (4096, 50_257) } else { (64, 257) };
    let mut store = VarStore::new(device);
    let _ = store.root().var_copy("weight", &numbers(&[classes, 8], 2).to_kind(Kind::Float));
    store.bfloat16();
    let weight = store.variables().remove("weight").expect("a weight");
    let hidden = numbers_there(&[tokens, 8], 1).to_kind(Kind::BFloat16);
    let targets = Tensor::arange(tokens, (Kind::Int64, device)).remainder(classes);
    let step = MicroBatcher::new(&store, MicroBatches::Samples(tokens as usize)).backward(
        &(hidden, targets),
        |(hidden, targets)| {
            linear_cross_entropy(&hidden, &weight, None, &targets, Default::default())
        },
    );
    step.expect("a step");
    weight.grad()
}

/// A CUDA graph must give the eager result, and a retried step that of the failed one.
#[test]
fn what_else_is_in_memory_changes_no_bit() {
    let memory = Memory::of(test_device()).expect("a memory");
    memory.set_limit(Some(4 << 30)).expect("a limit");
    let other = if test_device().is_cuda() { 3_300 << 20 } else { 1 };
    let (roomy, full) = (gradient_beside(1), gradient_beside(other));
    memory.set_limit(None).expect("no limit");
    assert_eq!(roomy, full);
}

#[test]
fn class_weights_that_want_a_gradient_are_refused() {
    let [hidden, weight] = leaves();
    let targets = Tensor::from_slice(&[0_i64, 4, 2, 1]).to_device(test_device());
    let weights = numbers_there(&[5], 3).set_requires_grad(true);
    let run = |weights: &Tensor| {
        let class_weights = Some(weights);
        let config = LinearCrossEntropyConfig { class_weights, ..Default::default() };
        linear_cross_entropy(&hidden, &weight, None, &targets, config)
    };
    assert_fails(run(&weights), &["class weights", "detach them"]);
    run(&weights.detach()).expect("a loss");
    tch::no_grad(|| run(&weights)).expect("a loss");
}

#[test]
fn what_does_not_fit_is_refused_before_the_work() {
    let (hidden, weight) = (Tensor::zeros([2, 4, 3], CPU), Tensor::zeros([5, 3], CPU));
    let targets = Tensor::zeros([2, 4], (Kind::Int64, Device::Cpu));
    let refused = |weight: &Tensor, bias, targets: &Tensor, config| match linear_cross_entropy(
        &hidden, weight, bias, targets, config,
    ) {
        Err(Error::Nn(error)) => error,
        other => panic!("not refused: {other:?}"),
    };
    let plain = LinearCrossEntropyConfig::default();
    let (wide, short) = (Tensor::zeros([5, 4], CPU), Tensor::zeros([4], CPU));
    let (double, floats) = (weight.to_kind(Kind::Double), targets.to_kind(Kind::Float));
    for (weight, bias, targets, words) in [
        (&wide, None, &targets, "the weight has the shape [5, 4]"),
        (&weight, None, &targets.view([8]), "the tensor of targets has the shape [8]"),
        (&weight, Some(&short), &targets, "the bias has the shape [4]"),
        (&double, None, &targets, "must be of the hidden states' Float"),
        (&weight, None, &floats, "must be integers, not Float"),
    ] {
        let error = refused(weight, bias, targets, plain).to_string();
        assert!(error.contains(words), "{error}");
    }
    let smooth = LinearCrossEntropyConfig { smoothing: 1.5, ..plain };
    let error = refused(&weight, None, &targets, smooth);
    assert_eq!(error, NnError::LossSmoothing(1.5));
    let _ = targets.get(1).get(2).fill_(5);
    let error = refused(&weight, None, &targets, plain).to_string();
    assert!(error.contains("target 5 at position 6 is none of the 5 classes"), "{error}");
}
