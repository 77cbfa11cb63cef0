//! BatchNorm with an addition, ReLU and a pooling, compared with the same in f64 on the CPU: values, gradients
//! and running statistics, for shapes that divide nothing, all dtypes, and pretended small GPUs.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0 … -- --test-threads=1` runs the custom kernels on a GPU; elsewhere libtorch's
//! operations run.

use std::thread;

use crate::test_device::test_device;
use brimful_torch::batch_norm::{
    Addend, NormInput, batch_norm, batch_norm_relu_pool, moments, second_use,
};
use brimful_torch::graph::{Pool, record};
use brimful_torch::memory_format::to_memory_format;
use brimful_torch::stream::Stream;
use brimful_torch::touched::touched;
use brimful_torch::{ErrorKind, TorchError, autograd, kernels, memory};
use tch::{Device, Kind, Tensor};

const EPS: f64 = 1e-5;
const MOMENTUM: f64 = 0.1;
/// Sums this close to the ReLU's bend get no gradient: f64 and f32 may be on either side of it.
const BEND: f64 = 2e-2;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Beside {
    Nothing,
    Tensor,
    Normed,
    /// Uses the output twice, so that two gradients come back.
    TensorAndSecondUse,
    Pooled,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    shape: [i64; 4],
    kind: Kind,
    /// Dtype of weights and running statistics.
    weights: Kind,
    beside: Beside,
    relu: bool,
    training: bool,
    mean: f64,
}

impl Case {
    fn new(shape: [i64; 4], kind: Kind, beside: Beside) -> Self {
        Self { shape, kind, weights: Kind::Float, beside, relu: true, training: true, mean: 0.0 }
    }

    /// Relative to the largest value of a tensor.
    fn tolerance(&self) -> f64 {
        // An f32 near 10,000 has three decimals, so a mean is off by up to 5e-4, and a weight gradient by that
        // times a large sum: libtorch's own is off by 3e-3 of the largest.
        let far = if self.mean == 0.0 { 1.0 } else { 500.0 };
        let count = self.shape[0] * self.shape[2] * self.shape[3];
        // Two numbers are always normalised to ±1; their remaining differences are rounding.
        let few: f64 = if count < 4 { 200.0 } else { 1.0 };
        match (self.kind, self.weights) {
            (Kind::BFloat16, _) => 2e-2,
            (Kind::Half, _) => 4e-3 * few.min(5.0),
            (_, Kind::Float) => 2e-5 * far * few,
            _ => 2e-2,
        }
    }
}

/// Returns pseudo-random numbers between -1 and 1.
fn numbers(shape: &[i64], seed: i64) -> Tensor {
    let count = shape.iter().product::<i64>();
    let index = Tensor::arange(count, (Kind::Double, Device::Cpu)) + seed as f64;
    (index.square() * 12.9898).sin().view(shape)
}

/// Inputs of a case, in f64 on the CPU, rounded as the device will have them.
struct Start {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    beside: Tensor,
    beside_weight: Tensor,
    beside_bias: Tensor,
    gradient: Tensor,
    more_gradient: Tensor,
}

impl Start {
    fn of(case: &Case) -> Self {
        let [_, channels, ..] = case.shape;
        let rounded = |tensor: Tensor, kind: Kind| tensor.to_kind(kind).to_kind(Kind::Double);
        let row = |seed, around: f64| rounded(numbers(&[channels], seed) + around, case.weights);
        let whole = |seed| rounded(numbers(&case.shape, seed), case.kind);
        Self {
            x: rounded(numbers(&case.shape, 1) * 1.5 + case.mean, case.kind),
            weight: row(2, 1.5),
            bias: row(3, 0.0),
            mean: row(4, 0.0),
            variance: row(5, 2.0),
            beside: whole(6),
            beside_weight: row(7, 1.5),
            beside_bias: row(8, 0.0),
            gradient: whole(9),
            more_gradient: whole(10),
        }
    }
}

/// Results by name.
type Outcome = Vec<(&'static str, Tensor)>;

/// One run of a case, on a device and in a dtype.
struct Run<'a> {
    case: &'a Case,
    start: &'a Start,
    device: Device,
    kind: Kind,
    weights: Kind,
}

impl Run<'_> {
    fn there(&self, tensor: &Tensor, kind: Kind) -> Tensor {
        let there = tensor.to_kind(kind).to_device(self.device);
        match there.dim() {
            4 => to_memory_format(&there, true).expect("four dimensions"),
            _ => there.copy(),
        }
    }

    fn norm<'a>(
        &self,
        x: &'a Tensor,
        [weight, bias]: [&'a Tensor; 2],
        [mean, variance]: &'a [Tensor; 2],
    ) -> NormInput<'a> {
        let (weight, bias, running) = (Some(weight), Some(bias), Some((mean, variance)));
        NormInput { weight, bias, running, training: self.case.training, ..bare(x) }
    }

    fn outcome(&self) -> Outcome {
        let Self { case, start, kind, weights, .. } = *self;
        let leaf = |tensor, kind| self.there(tensor, kind).detach().set_requires_grad(true);
        let (x, beside) = (leaf(&start.x, kind), leaf(&start.beside, kind));
        let (weight, bias) = (leaf(&start.weight, weights), leaf(&start.bias, weights));
        let beside_weight = leaf(&start.beside_weight, weights);
        let beside_bias = leaf(&start.beside_bias, weights);
        let running = [&start.mean, &start.variance].map(|t| self.there(t, weights));
        let beside_running = [&start.mean, &start.variance].map(|t| self.there(t, weights));
        let norm = self.norm(&x, [&weight, &bias], &running);
        let other = self.norm(&beside, [&beside_weight, &beside_bias], &beside_running);
        let y = match case.beside {
            Beside::Nothing => batch_norm(&norm, Addend::Nothing, case.relu),
            Beside::Tensor | Beside::TensorAndSecondUse => {
                batch_norm(&norm, Addend::Tensor(&beside), case.relu)
            }
            Beside::Normed => batch_norm(&norm, Addend::Normed(other), case.relu),
            Beside::Pooled => batch_norm_relu_pool(&norm),
        };
        let y = y.unwrap_or_else(|error| panic!("{case:?}: {error}"));
        self.backward(&y);
        let [mean, variance] = running;
        let mut all = vec![("y", y.detach()), ("mean", mean), ("variance", variance)];
        all.extend([("dx", x.grad()), ("d_weight", weight.grad()), ("d_bias", bias.grad())]);
        if matches!(case.beside, Beside::Tensor | Beside::TensorAndSecondUse | Beside::Normed) {
            all.push(("d_beside", beside.grad()));
        }
        if case.beside == Beside::Normed {
            all.push(("beside's d_weight", beside_weight.grad()));
            all.push(("beside's d_bias", beside_bias.grad()));
            all.push(("beside's variance", beside_running[1].copy()));
        }
        all
    }

    fn backward(&self, y: &Tensor) {
        let Self { case, start, kind, .. } = *self;
        let gradient = start.gradient.f_mul(&away_from_the_bend(case, start)).expect("a product");
        let gradient = self.there(&fitted(&gradient, y), kind);
        let result = match case.beside {
            Beside::TensorAndSecondUse => {
                let more = &start.more_gradient * away_from_the_bend(case, start);
                let second = second_use(y).expect("an alias");
                let more = self.there(&more, kind);
                autograd::backward(&[y, &second], &[Some(&gradient), Some(&more)], false)
            }
            _ => autograd::backward(&[y], &[Some(&gradient)], false),
        };
        result.unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

/// Returns a training norm without weights and running statistics.
fn bare(x: &Tensor) -> NormInput<'_> {
    let (weight, bias, running) = (None, None, None);
    NormInput { x, weight, bias, running, training: true, momentum: MOMENTUM, eps: EPS }
}

/// Crops the gradient to a pooled output.
fn fitted(gradient: &Tensor, y: &Tensor) -> Tensor {
    let [_, _, height, width] = y.size()[..] else { panic!("a picture") };
    gradient.narrow(2, 0, height).narrow(3, 0, width)
}

/// Returns ones, and zeros where the sum before the ReLU is close to 0.
fn away_from_the_bend(case: &Case, start: &Start) -> Tensor {
    if case.beside == Beside::Pooled {
        return Tensor::ones(case.shape, (Kind::Double, Device::Cpu));
    }
    let normed = |x: &Tensor, weight: &Tensor, bias: &Tensor| {
        let (mean, variance) = (!case.training).then_some((&start.mean, &start.variance)).unzip();
        let (w, b) = (Some(weight), Some(bias));
        Tensor::batch_norm(x, w, b, mean, variance, case.training, 0.0, EPS, false)
    };
    let mut sum = normed(&start.x, &start.weight, &start.bias);
    match case.beside {
        Beside::Tensor | Beside::TensorAndSecondUse => sum += &start.beside,
        Beside::Normed => {
            sum += normed(&start.beside, &start.beside_weight, &start.beside_bias);
        }
        _ => {}
    }
    sum.abs().ge(BEND).to_kind(Kind::Double)
}

fn check(case: &Case) {
    let start = Start::of(case);
    let run = |device, kind, weights| Run { case, start: &start, device, kind, weights }.outcome();
    let exact = run(Device::Cpu, Kind::Double, Kind::Double);
    let (ours, seen) =
        touched(|| run(test_device(), case.kind, case.weights)).expect("a list of operations");
    assert_eq!(kernels::refusals(), Vec::<String>::new(), "{case:?}");
    if test_device().is_cuda() && case.shape.iter().product::<i64>() > 0 {
        let own = seen.operations.iter().any(|line| line.starts_with("brimful::batch_norm"));
        assert!(own, "{case:?}: no kernel of ours in {:?}", seen.operations);
    }
    for ((name, ours), (_, exact)) in ours.iter().zip(&exact) {
        assert_near(case, name, ours, exact);
    }
    let again = run(test_device(), case.kind, case.weights);
    for ((name, first), (_, second)) in ours.iter().zip(&again) {
        // A single number has no variance: both runs give NaN.
        let bits = |t: &Tensor| t.nan_to_num(12_345.0, None::<f64>, None::<f64>);
        assert!(bits(first).equal(&bits(second)), "{case:?}: two runs differ in {name}");
    }
}

fn assert_near(case: &Case, name: &str, ours: &Tensor, exact: &Tensor) {
    assert_eq!(ours.size(), exact.size(), "{case:?}: {name}");
    let ours = ours.to_device(Device::Cpu).to_kind(Kind::Double).contiguous().view([-1]);
    let exact = exact.contiguous().view([-1]);
    let scale = exact.abs().max().double_value(&[]).max(1.0);
    let off = (&ours - &exact).abs();
    // A NaN counts as infinitely far, unless both are NaN.
    let both = ours.isnan().logical_and(&exact.isnan());
    let off = off.nan_to_num(f64::INFINITY, None::<f64>, None::<f64>).masked_fill(&both, 0.0);
    let worst = off.argmax(None::<i64>, false).int64_value(&[]);
    let distance = off.double_value(&[worst]);
    assert!(
        distance <= case.tolerance() * scale,
        "{case:?}: {name}[{worst}] is {}, in f64 {}; the largest is {scale}",
        ours.double_value(&[worst]),
        exact.double_value(&[worst])
    );
}

/// Shapes that divide nothing, one row, one channel, channels that do not fill vectors, many channels.
const SHAPES: [[i64; 4]; 10] = [
    [2, 64, 5, 7],
    [3, 8, 9, 11],
    [2, 24, 6, 5],
    [1, 1, 13, 17],
    [5, 3, 4, 4],
    [4, 130, 3, 3],
    [2, 1000, 2, 3],
    [1, 33, 1, 2],
    [7, 2048, 1, 1],
    [16, 64, 28, 28],
];

const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];

/// libtorch on a CPU computes the same in every dtype, slowly; f32 is enough there.
fn kinds() -> &'static [Kind] {
    if test_device().is_cuda() { &KINDS } else { &KINDS[..1] }
}

const BESIDE: [Beside; 3] = [Beside::Nothing, Beside::Tensor, Beside::Normed];

/// Checks each dtype with each shape and each addend, modified by `change`.
fn check_all(
    kinds: &[Kind],
    shapes: &[[i64; 4]],
    beside: &[Beside],
    change: impl Fn(Case) -> Case,
) {
    for &kind in kinds {
        for &shape in shapes {
            for &beside in beside {
                check(&change(Case::new(shape, kind, beside)));
            }
        }
    }
}

#[test]
fn training_is_as_in_f64() {
    check_all(kinds(), &SHAPES, &BESIDE, |case| case);
}

#[test]
fn evaluation_is_as_in_f64() {
    check_all(kinds(), &SHAPES, &BESIDE, |case| Case { training: false, ..case });
}

#[test]
fn without_a_relu_too() {
    let shapes = [[2, 64, 5, 7], [5, 3, 4, 4]];
    check_all(kinds(), &shapes, &[Beside::Nothing], |case| Case { relu: false, ..case });
}

#[test]
fn two_gradients_of_one_output_are_added() {
    let shapes = [[2, 64, 5, 7], [5, 3, 4, 4], [16, 256, 14, 14]];
    check_all(kinds(), &shapes, &[Beside::TensorAndSecondUse], |case| case);
}

#[test]
fn a_pooling_is_as_in_f64() {
    for training in [true, false] {
        check_pooled(|case| Case { training, ..case });
    }
}

/// Checks only f32: rounded numbers are sometimes equal, and then the maximum's position is arbitrary.
fn check_pooled(change: impl Fn(Case) -> Case) {
    check_all(&[Kind::Float], &POOLED, &[Beside::Pooled], change);
}

/// Even and odd sides, one pixel, and more rows than a block handles at once.
const POOLED: [[i64; 4]; 7] = [
    [2, 64, 8, 8],
    [2, 64, 7, 9],
    [3, 3, 5, 6],
    [1, 8, 1, 1],
    [4, 64, 2, 3],
    [16, 64, 28, 28],
    [3, 72, 57, 31],
];

/// Pooling of a BatchNorm with ReLU, fused or by libtorch. Returns the output and the gradients of input and
/// weight.
fn pooled(x: &Tensor, weight: &Tensor, in_one: bool) -> [Tensor; 3] {
    let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(true);
    let (x, weight) = (leaf(x), leaf(weight));
    let norm = NormInput { weight: Some(&weight), ..bare(&x) };
    let y = match in_one {
        true => batch_norm_relu_pool(&norm).expect("a pooling"),
        false => {
            let normed = batch_norm(&norm, Addend::Nothing, true).expect("a norm");
            normed.max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false)
        }
    };
    let counts = numbers(&y.size(), 3).to_device(y.device()).to_kind(y.kind());
    (&y * counts).sum(Kind::Float).backward();
    [y.detach(), x.grad(), weight.grad()]
}

#[test]
fn a_pooling_of_halves_is_that_of_what_would_have_been_kept() {
    let device = test_device();
    if !device.is_cuda() {
        return;
    }
    for kind in KINDS {
        for shape in POOLED {
            let x = numbers(&shape, 1).to_device(device).to_kind(kind);
            let x = to_memory_format(&x, true).expect("channels last");
            let weight = (numbers(&[shape[1]], 2) + 1.5).to_kind(Kind::Float).to_device(device);
            let [one, two] = [true, false].map(|in_one| pooled(&x, &weight, in_one));
            for (name, (ours, exact)) in
                ["y", "dx", "d_weight"].iter().zip(one.iter().zip(two.iter()))
            {
                let exact = exact.to_device(Device::Cpu).to_kind(Kind::Double);
                assert_near(&Case::new(shape, kind, Beside::Pooled), name, ours, &exact);
            }
        }
    }
}

#[test]
fn moments_are_those_of_f64() {
    let device = test_device();
    for &kind in kinds() {
        for shape in SHAPES {
            for mean in [0.0, 1e4] {
                // Half precision has no digits left there.
                if kind != Kind::Float && mean != 0.0 {
                    continue;
                }
                let case = Case { mean, ..Case::new(shape, kind, Beside::Nothing) };
                let x = Start::of(&case).x;
                let on_device = x.to_device(device).to_kind(kind);
                let on_device = to_memory_format(&on_device, true).expect("channels last");
                let [of_mean, variance] = moments(&on_device).expect("moments");
                let exact = x.transpose(0, 1).contiguous().view([shape[1], -1]);
                let (exact_variance, exact_mean) = exact.var_mean_dim(1, false, false);
                assert_near(&case, "mean", &of_mean, &exact_mean);
                assert_near(&case, "variance", &variance, &exact_variance);
            }
        }
    }
}

#[test]
fn weights_may_be_as_narrow_as_the_input() {
    if !test_device().is_cuda() {
        return;
    }
    let narrow = |case: Case| Case { weights: case.kind, ..case };
    check_all(&[Kind::BFloat16, Kind::Half], &[[2, 64, 5, 7]], &BESIDE, narrow);
}

#[test]
fn means_far_from_zero_do_not_cancel() {
    // Over 12,544 rows libtorch's own f32 mean on a CPU is off by more than the bend allows.
    let shapes = [[2, 64, 5, 7], [5, 3, 4, 4], [16, 64, 28, 28]];
    let shapes = if test_device().is_cuda() { &shapes[..] } else { &shapes[..2] };
    check_all(&[Kind::Float], shapes, &[Beside::Nothing], |case| Case { mean: 1e4, ..case });
}

#[test]
fn small_gpus_give_the_same() {
    if !test_device().is_cuda() {
        return;
    }
    for (multiprocessors, shared) in [(8, 48 << 10), (20, 100 << 10), (1, 48 << 10)] {
        kernels::pretend(multiprocessors, shared).expect("CUDA");
        let shapes = [[2, 64, 5, 7], [2, 1000, 2, 3], [16, 64, 28, 28], [5, 3, 4, 4]];
        check_all(&KINDS, &shapes, &BESIDE, |case| case);
        check_pooled(|case| case);
    }
    kernels::pretend(0, 0).expect("CUDA");
}

/// Returns images with 16 channels, whose kernels no other test of this file has loaded.
fn unseen(kind: Kind) -> Tensor {
    let x = numbers(&[4, 16, 9, 11], 1).to_kind(kind).to_device(test_device());
    to_memory_format(&x, true).expect("channels last")
}

/// Error numbers of the driver.
const OUT_OF_MEMORY: i32 = 2;
const NO_BINARY: i32 = 209;

#[test]
fn memory_that_runs_out_while_a_kernel_loads_is_out_of_memory_and_not_remembered() {
    if !test_device().is_cuda() {
        return;
    }
    let x = unseen(Kind::BFloat16);
    let normed = || batch_norm(&bare(&x), Addend::Nothing, false);
    kernels::fail_loads(0, 2, OUT_OF_MEMORY).expect("CUDA");
    let error = normed().expect_err("no memory, twice");
    assert_eq!(error.kind, ErrorKind::OutOfMemory, "{error}");
    assert!(error.message.contains("CUDA driver error: out of memory"), "{error}");
    let (y, seen) = touched(normed).expect("a list");
    assert!(seen.operations.iter().any(|line| line.starts_with("brimful::batch_norm")));
    assert_eq!(kernels::refusals(), Vec::<String>::new(), "libtorch is not asked");
    let exact = Tensor::batch_norm(
        &x.to_kind(Kind::Double),
        None::<&Tensor>,
        None::<&Tensor>,
        None::<&Tensor>,
        None::<&Tensor>,
        true,
        0.0,
        EPS,
        false,
    );
    let case = Case::new([4, 16, 9, 11], Kind::BFloat16, Beside::Nothing);
    assert_near(&case, "y", &y.expect("memory"), &exact.to_device(Device::Cpu));
}

#[test]
fn memory_in_reserve_is_given_back_for_a_kernel() {
    if !test_device().is_cuda() {
        return;
    }
    let x = unseen(Kind::Half);
    drop(Tensor::ones([64 << 20], (Kind::Float, test_device())));
    let reserved = || memory::device_memory(test_device()).expect("figures").reserved;
    let before = reserved();
    kernels::fail_loads(0, 1, OUT_OF_MEMORY).expect("CUDA");
    let _ = moments(&x).expect("memory, the second time");
    assert!(reserved() < before, "{} of {before} bytes", reserved());
}

/// Checks that a BatchNorm's running statistics are updated once if the second kernel of a layer cannot be
/// loaded.
fn moved_once(kind: Kind, layer: impl Fn(NormInput<'_>) -> Result<Tensor, TorchError>) {
    let x = unseen(kind);
    let zeros = || Tensor::zeros([16], (Kind::Float, test_device()));
    let [mean, variance, expected_mean, expected_variance] = [(); 4].map(|()| zeros());
    let norm = |running| NormInput { running: Some(running), ..bare(&x) };
    kernels::fail_loads(1, 1, NO_BINARY).expect("CUDA");
    let ours = layer(norm((&mean, &variance))).expect("libtorch's");
    let refusals = kernels::refusals();
    assert!(refusals.iter().any(|line| line.contains("NO_BINARY")), "{refusals:?}");
    kernels::set_enabled(false);
    let expected = layer(norm((&expected_mean, &expected_variance))).expect("libtorch's");
    kernels::set_enabled(true);
    assert!(ours.allclose(&expected, 1e-2, 1e-2, false));
    assert!(mean.allclose(&expected_mean, 1e-3, 1e-4, false), "the mean has moved once");
    assert!(variance.allclose(&expected_variance, 1e-3, 1e-4, false), "so has the variance");
}

#[test]
fn running_statistics_move_once_where_a_second_kernel_is_missing() {
    if !test_device().is_cuda() {
        return;
    }
    moved_once(Kind::Float, |norm| batch_norm_relu_pool(&norm));
    moved_once(Kind::Half, |beside| batch_norm(&bare(beside.x), Addend::Normed(beside), true));
}

#[test]
fn a_pooling_goes_backward_where_its_kernel_is_missing() {
    if !test_device().is_cuda() {
        return;
    }
    for kind in KINDS {
        for shape in POOLED {
            let x = numbers(&shape, 1).to_device(test_device()).to_kind(kind);
            let x = to_memory_format(&x, true).expect("channels last");
            let weight =
                (numbers(&[shape[1]], 2) + 1.5).to_kind(Kind::Float).to_device(test_device());
            let with = |shared| {
                let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(true);
                let (x, weight) = (leaf(&x), leaf(&weight));
                let norm = NormInput { weight: Some(&weight), ..bare(&x) };
                let y = batch_norm_relu_pool(&norm).expect("a pooling");
                let counts = numbers(&y.size(), 3).to_device(y.device()).to_kind(y.kind());
                kernels::pretend(0, shared).expect("CUDA");
                let done = autograd::backward(&[&y], &[Some(&counts)], false);
                kernels::pretend(0, 0).expect("CUDA");
                done.expect("gradients");
                [x.grad(), weight.grad()]
            };
            let [ours, plain] = [0, 1].map(with);
            for (name, (ours, plain)) in ["dx", "d_weight"].iter().zip(ours.iter().zip(&plain)) {
                let plain = plain.to_device(Device::Cpu).to_kind(Kind::Double);
                assert_near(&Case::new(shape, kind, Beside::Pooled), name, ours, &plain);
            }
        }
    }
    let refusals = kernels::refusals();
    assert!(refusals.iter().any(|line| line.contains("shared memory")), "{refusals:?}");
}

/// Applies a BatchNorm without weights to `x`, and a ReLU.
fn plain(x: &Tensor, training: bool, running: Option<(&Tensor, &Tensor)>) -> Tensor {
    let norm = NormInput { running, training, momentum: 1.0, ..bare(x) };
    batch_norm(&norm, Addend::Nothing, true).expect("normalised")
}

fn plain_in_f64(x: &Tensor) -> Tensor {
    let (x, none) = (x.to_kind(Kind::Double).to_device(Device::Cpu), None::<&Tensor>);
    Tensor::batch_norm(&x, none, none, none, none, true, 0.0, EPS, false).relu()
}

#[test]
fn infinities_and_nans_are_where_libtorch_has_them() {
    let x = numbers(&[2, 8, 5, 7], 1).to_kind(Kind::Float);
    let _ = x.narrow(1, 1, 1).narrow(2, 3, 1).fill_(f64::NAN);
    let _ = x.narrow(1, 2, 1).narrow(2, 2, 1).fill_(f64::INFINITY);
    let _ = x.narrow(1, 3, 1).narrow(0, 0, 1).narrow(2, 0, 1).fill_(f64::NEG_INFINITY);
    let there = to_memory_format(&x.to_device(test_device()), true).expect("a picture");
    let ours = plain(&there, true, None).to_device(Device::Cpu);
    assert_eq!(ours.isnan(), plain_in_f64(&x).isnan());
}

#[test]
fn inputs_at_odd_addresses_and_of_other_orders_are_taken() {
    for kind in kinds() {
        let shape = [2, 5, 7, 64];
        let long = numbers(&[2 * 5 * 7 * 64 + 1], 1).to_kind(*kind).to_device(test_device());
        let odd = long.narrow(0, 1, 2 * 5 * 7 * 64).view(shape).permute([0, 3, 1, 2]);
        let strided = numbers(&[2, 64, 5, 14], 1).to_kind(*kind).to_device(test_device());
        let strided = strided.slice(3, 0, 14, 2);
        let broad = numbers(&[2, 1, 5, 7], 1).to_kind(*kind).to_device(test_device());
        for x in
            [odd, strided.shallow_clone(), strided.contiguous(), broad.expand([2, 3, 5, 7], false)]
        {
            let (ours, exact) = (plain(&x, true, None), plain_in_f64(&x));
            let case = Case::new([2, 64, 5, 7], *kind, Beside::Nothing);
            assert_near(&case, "y", &ours, &exact);
        }
    }
}

#[test]
fn gradients_are_those_of_finite_differences_in_f64() {
    let x = numbers(&[2, 3, 2, 2], 1).set_requires_grad(true);
    let gradient = numbers(&[2, 3, 2, 2], 2);
    let loss = |x: &Tensor| (plain(x, true, None) * &gradient).sum(Kind::Double);
    loss(&x).backward();
    let (ours, step) = (x.grad().view([-1]), 1e-6);
    for i in 0..24 {
        let moved = |by: f64| {
            let x = x.detach().copy();
            let _ = x.view([-1]).narrow(0, i, 1).g_add_scalar_(by);
            loss(&x).double_value(&[])
        };
        let slope = (moved(step) - moved(-step)) / (2.0 * step);
        let got = ours.double_value(&[i]);
        assert!((got - slope).abs() < 1e-6, "element {i}: {got}, by differences {slope}");
    }
}

#[test]
fn captured_work_gives_what_eager_work_gives() {
    if !test_device().is_cuda() {
        return;
    }
    let device = test_device();
    let case = Case::new([16, 64, 14, 14], Kind::BFloat16, Beside::Tensor);
    let start = Start::of(&case);
    let run = Run { case: &case, start: &start, device, kind: case.kind, weights: case.weights };
    let x = run.there(&start.x, case.kind).set_requires_grad(true);
    let beside = run.there(&start.beside, case.kind);
    let gradient = run.there(&start.gradient, case.kind);
    let work = || -> Result<(Tensor, Tensor), TorchError> {
        let y = batch_norm(&bare(&x), Addend::Tensor(&beside), true)?;
        let mut x = x.shallow_clone();
        autograd::set_gradient(&mut x, None)?;
        autograd::backward(&[&y], &[Some(&gradient)], false)?;
        Ok((y.detach(), x.grad()))
    };
    let eager = work().expect("runs");
    let stream = Stream::urgent(device).expect("a stream");
    let (mut graph, captured) = record(stream, &mut Pool::default(), work).expect("captured");
    for _ in 0..3 {
        graph.replay().expect("replayed");
        brimful_torch::device::synchronize(device).expect("done");
        assert!(captured.0.equal(&eager.0) && captured.1.equal(&eager.1));
    }
}

#[test]
fn threads_on_streams_of_their_own_do_not_disturb_each_other() {
    let device = test_device();
    let expected: Vec<_> = (0..4).map(|seed| stressed(device, seed)).collect();
    thread::scope(|scope| {
        for (seed, expected) in expected.into_iter().enumerate() {
            scope.spawn(move || {
                let stream = device.is_cuda().then(|| Stream::urgent(device).expect("a stream"));
                let _inside = stream.map(|stream| stream.enter().expect("entered"));
                for turn in 0..20 {
                    let ours = stressed(device, seed as i64);
                    assert!(ours.equal(&expected), "thread {seed}, turn {turn}");
                }
            });
        }
    });
}

fn stressed(device: Device, seed: i64) -> Tensor {
    let x = numbers(&[4, 64, 14, 14], seed).to_kind(Kind::Float).to_device(device);
    let x = to_memory_format(&x, true).expect("a picture").set_requires_grad(true);
    let y = plain(&x, true, None);
    (&y * &y).sum(Kind::Float).backward();
    x.grad().to_device(Device::Cpu)
}

#[test]
fn more_than_two_to_the_31_numbers_are_normalised_to_the_last() {
    let device = test_device();
    let enough = 40_u64 << 30;
    if !device.is_cuda() || memory::device_memory(device).expect("figures").free < enough {
        return;
    }
    let (side, options) = (11_586, (Kind::BFloat16, device));
    let flat = Tensor::zeros([2, side, side, 8], options);
    let last = numbers(&[8, 8], 3).to_kind(Kind::BFloat16).to_device(device);
    flat.view([-1, 8]).narrow(0, 2 * side * side - 8, 8).copy_(&last);
    let x = flat.permute([0, 3, 1, 2]);
    let (mean, variance) = (Tensor::zeros([8], options), Tensor::ones([8], options));
    let y = plain(&x, false, Some((&mean, &variance))).permute([0, 2, 3, 1]);
    let y = y.reshape([-1, 8]).narrow(0, 2 * side * side - 8, 8);
    assert!(y.allclose(&last.relu(), 1e-2, 1e-2, false));
    let y = plain(&x, true, None).permute([0, 2, 3, 1]).reshape([-1, 8]);
    let y = y.narrow(0, 2 * side * side - 8, 8);
    assert_eq!(y.gt(1.0), last.gt(0.01), "the few that are not zero are far from the mean");
}

#[test]
fn switched_off_libtorch_does_it_all() {
    kernels::set_enabled(false);
    let x = numbers(&[2, 8, 5, 7], 1).to_kind(Kind::Float).to_device(test_device());
    let x = to_memory_format(&x, true).expect("a picture");
    let (_, seen) = touched(|| plain(&x, true, None)).expect("a list");
    kernels::set_enabled(true);
    assert!(!seen.operations.iter().any(|line| line.starts_with("brimful::")));
}
