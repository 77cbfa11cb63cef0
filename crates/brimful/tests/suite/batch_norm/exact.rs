//! An exact BatchNorm gives the plain model's result on the whole mini-batch, for every micro-batch size.

use brimful::memory::Arena;
use brimful::nn::{
    BatchNorm, BatchNormConfig, BatchNormPolicy, batch_norm1d, batch_norm2d, batch_norm3d,
};
use brimful::pipeline::{Builder, Offload};
use brimful::schedule::Recompute;
use brimful::{DeviceSpec, Layers, Loss, MicroBatcher, MicroBatches, Pipeline};
use tch::nn::{self, ModuleT, Path, VarStore};
use tch::{Device, Kind, Tensor};

use crate::support::pipeline_cases::{Plain, builder, piped};
use crate::support::state::fail_every_allocation;
use crate::support::{
    Named, assert_fails, assert_within, copies, numbers, numbers_there, test_device,
};

pub const EXACT: BatchNormConfig = BatchNormConfig {
    policy: BatchNormPolicy::Exact,
    eps: 1e-5,
    momentum: Some(0.1),
    affine: true,
};

/// Configuration of the plain model, in which a deferred BatchNorm is an ordinary one.
pub const DEFERRED: BatchNormConfig =
    BatchNormConfig { policy: BatchNormPolicy::Deferred, ..EXACT };

pub fn norm(p: &Path, dimensions: usize, config: BatchNormConfig) -> BatchNorm {
    let make = [batch_norm1d, batch_norm1d, batch_norm2d, batch_norm3d][dimensions];
    make(p, 4, config)
}

/// Multiplies the channels by a matrix.
pub fn mix(from: i64) -> impl Fn(&Path) -> nn::Func<'static> + Send + Sync {
    move |p| {
        let weight = p.randn("weight", &[from, 4], 0.0, 1.0);
        nn::func(move |x| x.transpose(1, -1).matmul(&weight).transpose(1, -1))
    }
}

/// Three BatchNorms of an input with this many dimensions after the channels, one of them in a shortcut.
pub fn layers(dimensions: usize, config: BatchNormConfig) -> Layers {
    Layers::new()
        .add("first", mix(3))
        .add_norm("norm1", move |p| norm(p, dimensions, config).with_relu())
        .stash("shortcut")
        .add("second", mix(4))
        .add_norm("norm2", move |p| norm(p, dimensions, config))
        .pop("sum", "shortcut", |x, shortcut| (x + shortcut).tanh())
        .add("third", mix(4))
        .add_norm("norm3", move |p| norm(p, dimensions, config))
        .add_fn("square", |x| x.square() + x)
}

/// Four consecutive BatchNorms of images.
pub fn four_norms() -> Layers {
    (0..4).fold(Layers::new().add("in", mix(3)), |layers, number| {
        layers
            .add_norm(format!("norm{number}"), |p| norm(p, 2, EXACT).with_relu())
            .add_fn(format!("tanh{number}"), |x| x.tanh())
    })
}

pub fn input(samples: i64, dimensions: usize) -> Tensor {
    let shape = [vec![samples, 3], vec![3; dimensions]].concat();
    numbers_there(&shape, 7) * 2.0 + 0.5
}

/// Sum of a mean and of a term whose denominator is known only at the end.
pub fn loss(out: &Tensor, x: &Tensor) -> Loss {
    let weights = x.flatten(1, -1).select(1, 0).abs() + 0.1;
    let each = out.sin().flatten(1, -1).sum_dim_intlist(1, false, Kind::Double);
    let mean = out.square().flatten(1, -1).mean_dim(1, false, Kind::Double).mean(Kind::Double);
    Loss::ratio((each * &weights).sum(Kind::Double), weights.sum(Kind::Double)) + Loss::mean(mean)
}

/// Runs the plain model on the whole mini-batch; returns the loss.
pub fn full_batch_backward(plain: &Plain, x: &Tensor) -> f64 {
    let mut whole = MicroBatcher::new(&plain.store, MicroBatches::Samples(x.size()[0] as usize));
    let step = whole.backward(x, |x| loss(&plain.model.forward_t(&x, true), &x));
    step.expect("the whole mini-batch").loss
}

/// Returns the plain model's gradients, and checks that every trained variable has one.
pub fn gradients_of(plain: &Plain) -> Named {
    let trained = plain.values().iter().filter(|(_, value)| value.requires_grad()).count();
    assert_eq!(plain.gradients().len(), trained);
    plain.gradients()
}

/// Returns both models, with the same variables.
pub fn both(dimensions: usize, config: BatchNormConfig, pipe: Pipeline) -> (Pipeline, Plain) {
    let plain = BatchNormConfig { policy: BatchNormPolicy::Deferred, ..config };
    let plain = Plain::of(&layers(dimensions, plain), &pipe);
    (pipe, plain)
}

/// Runs one step of both and compares.
pub fn assert_exact(pipe: &mut Pipeline, plain: &Plain, x: &Tensor, part: f64, what: &str) {
    let expected = full_batch_backward(plain, x);
    let step = pipe.backward(x, x, |out: Tensor, x| loss(&out, x)).expect(what);
    assert!((step.loss - expected).abs() <= part * expected.abs().max(1.0), "{what}: the loss");
    assert_left(pipe, plain, part, what);
}

/// Compares the results of steps of both.
fn assert_left(pipe: &Pipeline, plain: &Plain, part: f64, what: &str) {
    assert_gradients(pipe, plain, part, &format!("{what}: gradients"));
    let variables = pipe.variables().expect("variables");
    assert_within(&variables, &plain.values(), part, &format!("{what}: variables"));
}

pub fn assert_gradients(pipe: &Pipeline, plain: &Plain, part: f64, what: &str) {
    assert_within(&pipe.gradients().expect("gradients"), &gradients_of(plain), part, what);
}

#[test]
fn every_cut_is_the_full_batch() {
    for dimensions in 0..4 {
        for samples in [2, 5, 33] {
            for size in [1, 2, 7, samples] {
                let pipe = builder(layers(dimensions, EXACT), 1)
                    .micro_batches(MicroBatches::Samples(size));
                let (mut pipe, plain) = both(dimensions, EXACT, pipe.build().expect("a pipeline"));
                let x = input(samples as i64, dimensions);
                let what = format!("{dimensions} dimensions, {samples} by {size}");
                assert_exact(&mut pipe, &plain, &x, 1e-10, &what);
            }
        }
    }
}

#[test]
fn whatever_is_recomputed_and_wherever_stages_live() {
    for recompute in [Recompute::Never, Recompute::ExceptLast, Recompute::Always] {
        for locations in [Offload::Device, Offload::Host] {
            for affine in [true, false] {
                let what = format!("{recompute}, {locations:?}, affine: {affine}");
                let config = BatchNormConfig { affine, momentum: Some(0.3), ..EXACT };
                let pipe = builder(layers(2, config), 1).micro_batches(MicroBatches::Samples(3));
                let pipe = pipe.recompute(recompute).offload(locations.clone()).build();
                let (mut pipe, plain) = both(2, config, pipe.expect("a pipeline"));
                assert_exact(&mut pipe, &plain, &input(11, 2), 1e-10, &what);
            }
        }
    }
}

#[test]
fn one_sample_and_constant_channels_are_as_in_the_plain_layer() {
    let constant = input(6, 2) * 0.0 + 3.0;
    // Without variance, each of the three layers multiplies rounding errors by 1 / √ε.
    let config = BatchNormConfig { eps: 0.1, ..EXACT };
    for (dimensions, x) in [(0, input(1, 0)), (2, input(1, 2)), (2, constant)] {
        let pipe = builder(layers(dimensions, config), 1).micro_batches(MicroBatches::Samples(2));
        let (mut pipe, plain) = both(dimensions, config, pipe.build().expect("a pipeline"));
        assert_exact(&mut pipe, &plain, &x, 1e-10, &format!("{:?}", x.size()));
    }
}

/// The input itself has the large mean: a product before it would round in f32 by as much.
pub fn layers_of_inputs(config: BatchNormConfig) -> Layers {
    let norm = move |p: &Path| batch_norm2d(p, 3, config);
    Layers::new()
        .add_fn("input", |x| x * 1.0)
        .add_norm("norm", norm)
        // Without it the next BatchNorm would remove the bias: its gradient would be pure rounding.
        .add_fn("tanh", |x| x.tanh())
        .add_layers("rest", layers(2, config))
}

#[test]
fn f32_is_close_to_f64_even_around_a_large_mean() {
    tch::manual_seed(5);
    for (mean, part) in [(0.0, 1e-4), (1e4, 5e-3)] {
        let pipe = builder(layers_of_inputs(EXACT), 1).kind(Kind::Float);
        let mut pipe = pipe.micro_batches(MicroBatches::Samples(2)).build().expect("a pipeline");
        let plain = Plain::of(&layers_of_inputs(DEFERRED), &pipe);
        let x = (input(33, 2) + mean).to_kind(Kind::Float);
        full_batch_backward(&plain, &x.to_kind(Kind::Double));
        pipe.backward(&x, &x, |out: Tensor, x| loss(&out, x)).expect("a step");
        assert_gradients(&pipe, &plain, part, &format!("around {mean}"));
        let is_first = |(name, _): &(String, Tensor)| name.starts_with("norm.running");
        let running = |all: Named| all.into_iter().filter(is_first).collect::<Named>();
        let ours = running(pipe.variables().expect("variables"));
        // Each micro-batch's mean is an f32, which near 10,000 is off by up to 0.0005.
        assert_within(&ours, &running(plain.values()), 1e-4, &format!("around {mean}"));
    }
}

#[test]
fn frozen_layers_before_it_need_nothing_of_it() {
    let pipe = builder(layers(2, EXACT), 1).micro_batches(MicroBatches::Samples(2)).build();
    let (mut pipe, plain) = both(2, EXACT, pipe.expect("a pipeline"));
    let frozen = |name: &str| name.starts_with("first") || name.starts_with("norm1");
    pipe.freeze(frozen).expect("frozen");
    for (name, value) in plain.values() {
        let _itself = value.set_requires_grad(value.requires_grad() && !frozen(&name));
    }
    let x = input(5, 2);
    let expected = full_batch_backward(&plain, &x);
    let step = pipe.backward(&x, &x, |out: Tensor, x| loss(&out, x)).expect("a step");
    assert!((step.loss - expected).abs() <= 1e-10 * expected.abs());
    assert_gradients(&pipe, &plain, 1e-10, "what is trained");
}

#[test]
fn where_micro_batches_do_not_meet_it_is_refused_with_what_to_do() {
    let x = input(4, 0);
    assert_fails(builder(layers(0, EXACT), 2).build(), &["2 devices", "Deferred"]);
    let first = Layers::new().add_norm("norm", |p| norm(p, 0, EXACT));
    assert_fails(builder(first, 1).build(), &["'norm'", "for whose outputs it can wait: add one"]);

    let store = VarStore::new(test_device());
    let layer = batch_norm1d(store.root(), 3, EXACT);
    let x32 = x.to_kind(Kind::Float);
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
    let closure = |x: Tensor| {
        Ok::<_, brimful::Error>(Loss::sum(layer.f_forward_t(&x, true)?.sum(Kind::Float)))
    };
    assert_fails(micro.backward(&x32, closure), &["add_norm", "Pipeline::builder"]);

    let hidden = Layers::new().add("first", mix(3)).add("norm", |p| norm(p, 0, EXACT));
    let mut hidden = builder(hidden, 1).build().expect("a pipeline");
    assert_fails(hidden.backward(&x, &x, |out: Tensor, x| loss(&out, x)), &["add_norm"]);

    let changed = Layers::new().add("first", mix(3)).add_norm_many("norm", |p| {
        let norm = norm(p, 0, EXACT);
        move |x: &[Tensor], train| vec![norm.forward_t(&x[0].relu(), train)]
    });
    let mut changed = builder(changed, 1).build().expect("a pipeline");
    assert_fails(
        changed.backward(&x, &x, |out: Tensor, x| loss(&out, x)),
        &["do that in the layer before"],
    );
}

#[test]
fn other_policies_run_in_the_same_list_without_a_cut() {
    for policy in
        [BatchNormPolicy::Deferred, BatchNormPolicy::PerMicroBatch, BatchNormPolicy::Frozen]
    {
        let config = BatchNormConfig { policy, ..EXACT };
        let mut pipe = piped(layers(1, config), 1, 3);
        assert_eq!(pipe.balance().sizes(), [9]);
        let x = input(6, 1);
        pipe.backward(&x, &x, |out: Tensor, x| loss(&out, x)).expect("a step");
    }
}

/// Device with its own arena and offloaded stages.
fn streamed(layers: Layers, arena: &Arena) -> Builder {
    let device = DeviceSpec::cpu().threads(1).arena(arena.clone());
    Pipeline::builder(layers).devices([device]).offload(Offload::Host).kind(Kind::Double)
}

#[test]
fn whichever_allocation_fails_all_is_as_before_and_the_next_step_is_exact() {
    let x = numbers(&[3, 3], 7);
    // A minimal list of layers: every allocation is tested.
    let layers = |config| {
        let layers = Layers::new().add("first", mix(3));
        layers.add_norm("norm", move |p| norm(p, 0, config)).add("last", mix(4))
    };
    let plain_loss = |out: &Tensor| Loss::mean(out.square().mean(Kind::Double));
    // Within the limit all held activations are on the host.
    for (locations, limit) in
        [(Offload::Device, None), (Offload::Device, Some(1 << 20)), (Offload::Host, None)]
    {
        let arena = Arena::new("device");
        arena.set_limit(limit).expect("a limit");
        let pipe = streamed(layers(EXACT), &arena).offload(locations.clone());
        let pipe =
            pipe.micro_batches(MicroBatches::Samples(2)).recompute(Recompute::ExceptLast).build();
        let mut pipe = pipe.expect("a pipeline");
        let before = copies(&pipe.variables().expect("variables"));
        let left = |pipe: &Pipeline| {
            let values = copies(&pipe.variables().expect("variables"));
            values.into_iter().chain(pipe.gradients().expect("gradients")).collect()
        };
        let step =
            |pipe: &mut Pipeline| pipe.backward(&x, &x, move |out: Tensor, _| plain_loss(&out));
        let what = format!("{locations:?}, {limit:?}");
        let failures = fail_every_allocation(&what, &arena, &mut pipe, left, step);
        assert!(failures > 100, "{failures} allocations were tried");
        let plain = Plain::on((Kind::Double, Device::Cpu), &layers(DEFERRED), before);
        let whole = MicroBatcher::new(&plain.store, MicroBatches::Samples(3))
            .backward(&x, |x| plain_loss(&plain.model.forward_t(&x, true)));
        whole.expect("the whole mini-batch");
        assert_left(&pipe, &plain, 1e-10, "after all failures");
    }
}

#[test]
fn with_offloaded_stages_on_the_host_memory_does_not_grow_with_the_mini_batch() {
    let peak = |samples: i64| {
        let arena = Arena::new("device");
        let pipe = streamed(four_norms(), &arena).micro_batches(MicroBatches::Samples(4));
        let mut pipe = pipe.recompute(Recompute::Always).build().expect("a pipeline");
        let x = numbers(&[samples, 3, 32, 32], 7);
        for _ in 0..2 {
            pipe.backward(&x, &x, |out: Tensor, x| loss(&out, x)).expect("a step");
        }
        arena.peak() as f64
    };
    let (few, many) = (peak(32), peak(256));
    assert!(many <= 1.03 * few, "{few} bytes for 32 samples, {many} for 256");
}
