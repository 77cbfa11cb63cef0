//! A closure or a layer that changes its input in place is refused, and the mini-batch stays unchanged.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0 … -- --test-threads=1` on a GPU, with the mini-batch there too.

use crate::support::{gradients, test_device};
use brimful::batch::BatchError;
use brimful::layers::Layers;
use brimful::pipeline::Builder;
use brimful::schedule::Recompute;
use brimful::{DeviceSpec, Error, Loss, MicroBatcher, MicroBatches, Pipeline, Replicas};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

fn samples() -> (Tensor, Tensor) {
    let options = (Kind::Float, test_device());
    (Tensor::rand([12, 4], options) + 1.0, Tensor::rand([12, 2], options) + 1.0)
}

fn halved(x: &Tensor) -> Tensor {
    x.shallow_clone().g_div_scalar_(2.0)
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, Error>, what: &str) {
    let error = result.expect_err(what);
    assert!(error.to_string().contains("was changed in place"), "{what}: {error}");
}

/// Runs `f` on a mini-batch and checks that it is unchanged.
fn unharmed(what: &str, f: impl FnOnce(&(Tensor, Tensor))) {
    let batch = samples();
    let before = (batch.0.copy(), batch.1.copy());
    f(&batch);
    assert_eq!(batch, before, "{what}");
}

#[test]
fn a_micro_batcher_refuses_before_the_mini_batch_has_changed() {
    let store = nn::VarStore::new(test_device());
    let model = nn::linear(store.root(), 4, 2, Default::default());
    let loss =
        |x: &Tensor, y: &Tensor| Loss::mean((model.forward(x) - y).square().mean(Kind::Float));
    let first = |(x, y): (Tensor, Tensor)| loss(&halved(&x), &y);
    let second = |(x, y): (Tensor, Tensor)| loss(&x, &halved(&y));
    for size in [
        MicroBatches::Samples(5),
        MicroBatches::Count(1),
        MicroBatches::Auto,
        MicroBatches::Largest,
    ] {
        let mut micro = MicroBatcher::new(&store, size);
        for (leaf, name) in ["the input", "the target"].iter().enumerate() {
            unharmed(name, |batch| {
                let result = match leaf {
                    0 => micro.backward(batch, first),
                    _ => micro.backward(batch, second),
                };
                assert_eq!(
                    result.expect_err(name),
                    Error::Batch(BatchError::Changed { leaf }),
                    "{size:?}"
                );
            });
        }
        unharmed("a window", |batch| assert_refused(micro.accumulate(batch, first), "a window"));
        unharmed("evaluate", |batch| assert_refused(micro.evaluate(batch, first), "evaluate"));
        unharmed("map", |batch| {
            assert_refused(micro.map(batch, |(x, _): (Tensor, Tensor)| halved(&x)), "map");
        });
        unharmed("backward_whole", |batch| {
            let forward = |(x, _): (Tensor, Tensor)| model.forward(&halved(&x));
            let whole = |outputs: &Tensor| outputs.square().sum(Kind::Float);
            assert_refused(micro.backward_whole(batch, forward, whole), "backward_whole");
        });
        assert!(gradients(&store).is_empty());
        // The micro-batcher stays usable.
        unharmed("a closure that makes its own", |batch| {
            let own = |(x, y): (Tensor, Tensor)| loss(&(x / 2.0), &y);
            micro.evaluate(batch, own).expect("a loss");
        });
    }
}

#[test]
fn what_is_changed_later_than_in_the_first_micro_batch_is_refused_too() {
    let store = nn::VarStore::new(test_device());
    let model = nn::linear(store.root(), 4, 2, Default::default());
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(4));
    let (x, _) = samples();
    let mut calls = 0;
    let result = micro.backward(&x, |x: Tensor| {
        calls += 1;
        let x = if calls == 2 { halved(&x) } else { x };
        Loss::mean(model.forward(&x).square().mean(Kind::Float))
    });
    assert_refused(result, "the second micro-batch");
    assert!(gradients(&store).is_empty());
}

#[test]
fn copies_from_another_device_may_be_changed() {
    if !test_device().is_cuda() {
        return;
    }
    let store = nn::VarStore::new(test_device());
    let model = nn::linear(store.root(), 4, 2, Default::default());
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(4));
    let (x, _) = samples();
    let x = x.to_device(Device::Cpu);
    let before = x.copy();
    let run = |micro: &mut MicroBatcher, in_place: bool| {
        let step = micro.evaluate(&x, |x: Tensor| {
            let x = if in_place { halved(&x) } else { x / 2.0 };
            Loss::mean(model.forward(&x).square().mean(Kind::Float))
        });
        step.expect("a loss").loss
    };
    let (one, two) = (run(&mut micro, true), run(&mut micro, false));
    assert_eq!((x, one), (before, two));
}

#[test]
fn replicas_refuse_before_the_mini_batch_has_changed() {
    let devices = [test_device()].map(DeviceSpec::from);
    for size in [MicroBatches::Samples(4), MicroBatches::Auto] {
        let build = |root: &nn::Path| nn::linear(root, 4, 2, Default::default());
        let mut replicas = Replicas::new(devices.clone(), size, build).expect("replicas");
        unharmed("replicas", |batch| {
            let result = replicas.backward(batch, |model, (x, y): (Tensor, Tensor)| {
                Loss::mean((model.forward(&halved(&x)) - y).square().mean(Kind::Float))
            });
            assert_refused(result, "replicas");
        });
        assert!(gradients(replicas.store()).is_empty());
    }
}

fn linear(inputs: i64, outputs: i64) -> impl Fn(&nn::Path) -> nn::Linear + Send + Sync {
    move |p| nn::linear(p, inputs, outputs, Default::default())
}

fn layers(in_place: bool) -> Layers {
    let first = move |x: &Tensor| if in_place { halved(x) } else { x / 2.0 };
    Layers::new().add_fn("halved", first).add("hidden", linear(4, 4)).add("output", linear(4, 2))
}

#[test]
fn a_pipeline_refuses_before_the_mini_batch_has_changed() {
    for (stages, recompute) in [
        (1, Recompute::Never),
        (2, Recompute::Never),
        (2, Recompute::ExceptLast),
        (2, Recompute::Always),
        (1, Recompute::Always),
    ] {
        let what = format!("{stages} stages, {recompute:?}");
        let pipe = |in_place| {
            Pipeline::builder(layers(in_place))
                .devices(vec![test_device(); stages])
                .micro_batches(MicroBatches::Count(3))
                .recompute(recompute)
                .build()
                .expect("a pipeline")
        };
        let square = |out: Tensor, y: &Tensor| Loss::mean((out - y).square().mean(Kind::Float));
        let mut pipeline = pipe(true);
        unharmed(&what, |(x, y)| assert_refused(pipeline.backward(x, y, square), &what));
        unharmed(&what, |(x, y)| assert_refused(pipeline.evaluate(x, y, square), &what));
        let mut pipeline = pipe(false);
        let changing = move |out: Tensor, y: &Tensor| square(out, &halved(y));
        unharmed(&what, |(x, y)| assert_refused(pipeline.backward(x, y, changing), &what));
        unharmed(&what, |(x, y)| drop(pipeline.backward(x, y, square).expect("a step")));
    }
}

/// The error is the pipeline's, not libtorch's, and names the layer.
#[test]
fn a_layer_that_changes_its_stage_s_input_is_named_with_what_helps() {
    let helps = "it changes a tensor in place that needs a gradient (its stage's input, or a parameter): make a new \
                 tensor (`relu` for `relu_`), or merge the layer with the one before";
    // The input itself, a view of it, and a skip from another stage.
    let hidden = Layers::new().add("hidden", linear(4, 2));
    let added = |x: &Tensor, skip: &Tensor| skip.shallow_clone().g_add_(x);
    let stashed = hidden.clone().stash("skip");
    let relu = stashed.clone().add_fn("relu", |x| x.shallow_clone().relu_());
    let view = hidden.add_fn("view", |x| x.narrow(1, 0, 1).relu_()).add("output", linear(1, 2));
    let changing = [
        (relu.pop("join", "skip", added), vec![1, 3], 1, "relu"),
        (view, vec![1, 2], 1, "view"),
        (stashed.add("inner", linear(2, 2)).pop("join", "skip", added), vec![2, 1, 1], 2, "join"),
    ];
    let modes = [None].into_iter().chain(Recompute::ALL.map(Some));
    for (recompute, (layers, balance, stage, layer)) in
        modes.flat_map(|recompute| changing.clone().map(|c| (recompute, c)))
    {
        let pipe = Pipeline::builder(layers)
            .devices(vec![test_device(); balance.len()])
            .balance(balance)
            .micro_batches(MicroBatches::Count(3));
        let pipe = recompute.into_iter().fold(pipe, Builder::recompute).build();
        let square = |out: Tensor, y: &Tensor| Loss::mean((out - y).square().mean(Kind::Float));
        let (x, y) = samples();
        let error = pipe.expect("a pipeline").backward(&x, &y, square);
        let error = error.expect_err("changed in place").to_string();
        let ends = format!(", in layer '{layer}': {helps}");
        match recompute {
            None => assert_eq!(
                error,
                format!("stage {stage} failed in the forward of micro-batch 0{ends}")
            ),
            // A recompute may be the first to notice.
            Some(mode) => {
                let began = format!("stage {stage} failed in the ");
                assert!(error.starts_with(&began) && error.ends_with(&ends), "{mode}: {error}");
            }
        }
    }
}
