//! Channels-last memory format: the same gradients, the same optimizer, the same file.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU, `BRIMFUL_TEST_CUDA_GRAPHS=1` with CUDA graphs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Update, assert_within, fill, micro_batcher, numbers, test_device, variables};
use brimful::micro::MemoryFormat;
use brimful::nn::{BatchNormConfig, BatchNormPolicy, batch_norm2d};
use brimful::optim::{AdamW, Optimizer};
use brimful::pipeline::Offload;
use brimful::save::{self, Metadata};
use brimful::{Layers, Loss, MicroBatcher, MicroBatches, Pipeline};
use tch::nn::{self, ModuleT, VarStore};
use tch::{Kind, Reduction, Tensor};

const CLASSES: i64 = 4;

struct ConvNet {
    store: VarStore,
    layers: nn::SequentialT,
    optimizer: Optimizer,
}

impl ConvNet {
    fn new() -> Self {
        let mut store = VarStore::new(test_device());
        let root = store.root();
        let padded = nn::ConvConfig { padding: 1, ..Default::default() };
        let layers = nn::seq_t()
            .add(nn::conv2d(&root / "one", 3, 8, 3, padded))
            .add(batch_norm2d(&root / "norm", 8, Default::default()))
            .add_fn(Tensor::relu)
            .add(nn::conv2d(&root / "two", 8, 6, 3, padded))
            .add_fn(|x| x.relu().mean_dim([2_i64, 3].as_slice(), false, x.kind()))
            .add(nn::linear(&root / "out", 6, CLASSES, Default::default()));
        store.set_kind(Kind::Double);
        fill(&store);
        let optimizer = Optimizer::new(&store, AdamW::new(0.01)).expect("an optimizer");
        Self { store, layers, optimizer }
    }

    fn step(&mut self, micro: &mut MicroBatcher, samples: &(Tensor, Tensor)) -> f64 {
        let layers = &self.layers;
        let step = micro.backward(samples, |(x, y): (Tensor, Tensor)| {
            let logits = layers.forward_t(&x, true);
            let loss = logits.cross_entropy_loss::<Tensor>(&y, None, Reduction::Mean, -100, 0.0);
            Loss::mean(loss)
        });
        let loss = step.expect("a step").loss;
        self.optimizer.update();
        loss
    }
}

fn batch(seed: i64) -> (Tensor, Tensor) {
    let y = (numbers(&[16], 200 + seed) * 1e4).remainder(CLASSES as f64);
    (numbers(&[16, 3, 6, 6], 100 + seed), y.to_kind(Kind::Int64))
}

fn is_channels_last(tensor: &Tensor) -> bool {
    !tensor.is_contiguous() && tensor.stride()[1] == 1
}

#[test]
fn steps_in_any_order_of_memory_are_the_same() {
    for memory_format in [MemoryFormat::ChannelsLast, MemoryFormat::Measured] {
        let [mut plain, mut formatted] = [(); 2].map(|()| ConvNet::new());
        let mut one = MicroBatcher::new(&plain.store, MicroBatches::Samples(4));
        let mut two =
            micro_batcher(&formatted.store, MicroBatches::Samples(4)).memory_format(memory_format);
        for step in 0..8 {
            let samples = batch(step);
            let (a, b) = (plain.step(&mut one, &samples), formatted.step(&mut two, &samples));
            assert!((a - b).abs() < 1e-9 * a.abs(), "{memory_format:?} step {step}: {a} {b}");
        }
        let found = variables(&formatted.store);
        assert_within(&found, &variables(&plain.store), 1e-8, &format!("{memory_format:?}"));
        let weight = &formatted.store.variables()["two.weight"];
        assert_eq!(is_channels_last(weight), two.is_channels_last());
        assert!(memory_format == MemoryFormat::Measured || two.is_channels_last());
    }
}

#[test]
fn a_saved_model_does_not_tell() {
    let [mut plain, mut formatted] = [(); 2].map(|()| ConvNet::new());
    let mut one = MicroBatcher::new(&plain.store, MicroBatches::Count(1));
    let mut two = MicroBatcher::new(&formatted.store, MicroBatches::Count(1))
        .memory_format(MemoryFormat::ChannelsLast);
    let samples = batch(0);
    plain.step(&mut one, &samples);
    formatted.step(&mut two, &samples);
    let file = tempfile::NamedTempFile::new().expect("a file");
    save::write(file.path(), &variables(&formatted.store), &Metadata::new()).expect("written");
    let (read, _) = save::read(file.path()).expect("read");
    assert_within(&read, &variables(&plain.store), 1e-9, "read");
}

#[test]
fn a_closure_that_asks_for_a_view_runs_as_before() {
    let store = VarStore::new(test_device());
    let convolution = nn::conv2d(store.root(), 3, 4, 3, Default::default());
    let mut micro =
        micro_batcher(&store, MicroBatches::Samples(4)).memory_format(MemoryFormat::Measured);
    let samples = numbers(&[16, 3, 6, 6], 1).to_kind(Kind::Float);
    for _ in 0..8 {
        let step = micro.backward(&samples, |x: Tensor| {
            let out = x.apply(&convolution);
            // In channels-last format these rows are not contiguous.
            Loss::mean(out.view([out.size()[0], -1]).square().mean(Kind::Float))
        });
        assert!(step.expect("a step").loss.is_finite());
    }
    assert!(!micro.is_channels_last());
    assert!(store.variables()["weight"].is_contiguous());
}

/// Covers evaluation, map and a loss on all outputs, as the calls that ask for a view.
#[test]
fn so_does_an_evaluation_between_steps_that_run_in_any_order() {
    let store = VarStore::new(test_device());
    let convolution = nn::conv2d(store.root(), 3, 4, 3, Default::default());
    let samples = numbers(&[16, 3, 6, 6], 1).to_kind(Kind::Float);
    let rows = |x: Tensor| {
        let out = x.apply(&convolution);
        out.view([out.size()[0], -1])
    };
    type Call<'a> = &'a dyn Fn(&mut MicroBatcher) -> brimful::Result<()>;
    let mean = |rows: &Tensor| rows.square().mean(Kind::Float);
    let calls: [Call<'_>; 3] = [
        &|micro| micro.evaluate(&samples, |x| Loss::mean(mean(&rows(x)))).map(drop),
        &|micro| micro.map(&samples, rows).map(drop),
        &|micro| micro.backward_whole(&samples, rows, |out| mean(out)).map(drop),
    ];
    for (number, call) in calls.iter().enumerate() {
        let mut micro =
            micro_batcher(&store, MicroBatches::Samples(4)).memory_format(MemoryFormat::Measured);
        for step in 0..8 {
            let done = micro.backward(&samples, |x: Tensor| {
                Loss::mean(x.apply(&convolution).square().mean(Kind::Float))
            });
            done.expect("a step");
            call(&mut micro).unwrap_or_else(|error| panic!("call {number}, step {step}: {error}"));
        }
        assert!(!micro.is_channels_last(), "call {number}");
    }
}

#[test]
fn a_call_that_fails_in_any_order_of_memory_ends_no_measurement() {
    let mut net = ConvNet::new();
    let mut micro =
        micro_batcher(&net.store, MicroBatches::Samples(4)).memory_format(MemoryFormat::Measured);
    for step in 0.. {
        if micro.is_channels_last() {
            break;
        }
        assert!(step < 8, "it is never tried");
        net.step(&mut micro, &batch(step));
    }
    let refused = micro.backward(&batch(0).0, |x| Loss::mean(x.mean(Kind::Double) / 0.0));
    refused.expect_err("not finite");
    assert!(micro.is_channels_last(), "still measured");
}

#[test]
fn a_model_without_convolutions_is_left_alone() {
    let store = VarStore::new(test_device());
    let linear = nn::linear(store.root(), 6, 4, Default::default());
    let mut micro =
        micro_batcher(&store, MicroBatches::Samples(4)).memory_format(MemoryFormat::ChannelsLast);
    let samples = numbers(&[16, 6], 1).to_kind(Kind::Float);
    micro
        .backward(&samples, |x: Tensor| Loss::mean(x.apply(&linear).square().mean(Kind::Float)))
        .expect("a step");
    assert!(!micro.is_channels_last());
}

/// Two convolutions with an exact BatchNorm between them, after which channels-last inputs are counted.
fn exact_layers(seen: &Arc<AtomicUsize>) -> Layers {
    let padded = nn::ConvConfig { padding: 1, ..Default::default() };
    let exact = BatchNormConfig { policy: BatchNormPolicy::Exact, ..Default::default() };
    let seen = Arc::clone(seen);
    Layers::new()
        .add("one", move |p| nn::conv2d(p, 3, 8, 3, padded))
        .add_norm("norm", move |p| batch_norm2d(p, 8, exact).with_relu())
        .add_fn("look", move |x| {
            seen.fetch_add(usize::from(is_channels_last(x)), Ordering::Relaxed);
            x.shallow_clone()
        })
        .add("two", move |p| nn::conv2d(p, 8, 6, 3, padded))
        .add_fn("mean", |x| x.mean_dim([2_i64, 3].as_slice(), false, x.kind()))
        .add("out", |p| nn::linear(p, 6, CLASSES, Default::default()))
}

/// Dtype in which convolutions accept channels last on the tested device, and the tolerance of losses: CUDA's f64
/// convolutions return contiguous tensors.
fn convolved() -> (Kind, f64) {
    if test_device().is_cuda() { (Kind::Float, 1e-3) } else { (Kind::Double, 1e-9) }
}

fn pipeline(memory_format: MemoryFormat, offload: Offload) -> (Pipeline, Arc<AtomicUsize>) {
    let seen = Arc::new(AtomicUsize::new(0));
    let builder = Pipeline::builder(exact_layers(&seen)).devices([test_device()]);
    let builder =
        builder.kind(convolved().0).offload(offload).micro_batches(MicroBatches::Samples(4));
    let mut pipe = builder.memory_format(memory_format).build().expect("a pipeline");
    // Sets values without a seed, which concurrent tests would change.
    let values = pipe.variables().expect("variables").into_iter().map(|(name, value)| {
        let new = match value.requires_grad() {
            true => numbers(&value.size(), name.len() as i64).to_kind(value.kind()),
            false => value.copy(),
        };
        (name, new)
    });
    pipe.set_variables(values.collect()).expect("values");
    (pipe, seen)
}

/// Runs eight steps; returns their losses.
fn trained(pipe: &mut Pipeline) -> Vec<f64> {
    let mut optimizer = pipe.optimizer(AdamW::new(0.01)).expect("an optimizer");
    let step = |number| {
        let (x, y) = batch(number);
        let x = x.to_kind(convolved().0);
        let loss = |out: Tensor, y: &Tensor| {
            Loss::mean(out.cross_entropy_loss::<Tensor>(y, None, Reduction::Mean, -100, 0.0))
        };
        let loss = pipe.backward(&x, &y, loss).expect("a step").loss;
        optimizer.update();
        loss
    };
    (0..8).map(step).collect()
}

#[track_caller]
fn assert_near(expected: &[f64], losses: &[f64], what: &str) {
    for (step, (a, b)) in expected.iter().zip(losses).enumerate() {
        assert!((a - b).abs() < convolved().1 * a.abs(), "{what}, step {step}: {a} {b}");
    }
}

#[test]
fn a_pipeline_with_exact_batch_norms_has_its_channels_last_through_all_stages() {
    let (mut plain, seen) = pipeline(MemoryFormat::AsIs, Offload::default());
    let expected = trained(&mut plain);
    assert_eq!(seen.load(Ordering::Relaxed), 0);
    for memory_format in [MemoryFormat::ChannelsLast, MemoryFormat::Measured] {
        let (mut pipe, seen) = pipeline(memory_format, Offload::default());
        assert_near(&expected, &trained(&mut pipe), &format!("{memory_format:?}"));
        // Four micro-batches per step; a measured format has two steps in each format, and one before each.
        let seen = seen.load(Ordering::Relaxed);
        assert!(
            seen == 8 * 4 || memory_format == MemoryFormat::Measured && seen >= 3 * 4,
            "{memory_format:?}: {seen}"
        );
        let variables = pipe.variables().expect("variables");
        for (name, value) in
            variables.iter().filter(|_| memory_format == MemoryFormat::ChannelsLast)
        {
            let convolves = matches!(name.as_str(), "one.weight" | "two.weight");
            assert_eq!(is_channels_last(value), convolves, "{name}");
        }
    }
}

#[test]
fn stages_that_live_on_the_host_stay_as_they_are() {
    let (mut plain, _) = pipeline(MemoryFormat::AsIs, Offload::Host);
    let (mut pipe, seen) = pipeline(MemoryFormat::ChannelsLast, Offload::Host);
    assert_near(&trained(&mut plain), &trained(&mut pipe), "on the host");
    assert_eq!(seen.load(Ordering::Relaxed), 0);
}
