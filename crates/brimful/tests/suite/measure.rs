//! Measurement of layers: its results, and that it leaves nothing behind.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::pipeline_cases::linear;
use brimful::balance::{self, LayerCost, Profile};
use brimful::batch::BatchError;
use brimful::memory::Arena;
use brimful::{Error, Layers};
use tch::nn::{self, Path};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn profile(layers: &Layers, batch: &Tensor) -> brimful::Result<Profile> {
    balance::measure(layers, Device::Cpu, batch)
}

fn measure(layers: &Layers, batch: &Tensor) -> Vec<LayerCost> {
    profile(layers, batch).expect("a profile").layers
}

/// Linear layers with 64 and 4096 outputs, a ReLU between them.
fn perceptron() -> Layers {
    Layers::new()
        .add("small", linear(256, 64))
        .add_fn("relu", |x| x.relu())
        .add("large", linear(64, 4096))
}

#[test]
fn sizes_are_exact_and_shown_layer_by_layer() {
    let batch = Tensor::ones([8, 256], CPU);
    let mut seen = Vec::new();
    let watch = |layer: &LayerCost| seen.push(layer.name.clone());
    let profile = balance::measure_of_kind(&perceptron(), Device::Cpu, &batch, Kind::Float, watch);
    let profile = profile.expect("a profile");
    assert_eq!(profile.input_bytes, 1024);
    let names: Vec<_> = profile.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names, ["small", "relu", "large"]);
    assert_eq!(seen, names, "each is shown as it is measured");
    let sizes =
        |layer: &LayerCost| (layer.parameter_bytes, layer.activation_bytes, layer.output_bytes);
    let sizes: Vec<_> = profile.layers.iter().map(sizes).collect();
    // Each keeps its output; the inputs exist already.
    assert_eq!(sizes, [(257 * 64 * 4, 256, 256), (0, 256, 256), (65 * 4096 * 4, 16_384, 16_384)]);
}

#[test]
fn what_is_kept_beyond_the_output_counts() {
    let layers = Layers::new().add("first", linear(100, 100)).add_fn("twice", |x| x.exp().exp());
    assert_eq!(measure(&layers, &Tensor::ones([4, 100], CPU))[1].activation_bytes, 800);
}

#[test]
fn times_and_both_parts_of_a_backward_are_there_and_a_larger_layer_takes_longer() {
    let measured = measure(&perceptron(), &Tensor::ones([64, 256], CPU));
    let step = |layer: &LayerCost| 2.0 * layer.overhead + 64.0 * (layer.forward + layer.backward);
    assert!(measured.iter().all(|layer| step(layer) > 0.0), "{measured:?}");
    assert!(step(&measured[2]) > step(&measured[1]), "{measured:?}");
    let (input, weight) = measured[0].split_backward();
    assert_eq!(input, 0.0, "nobody waits for the gradient of the batch");
    assert!(weight > 0.0 || measured[0].overhead > 0.0, "{measured:?}");
    let halves = |layer: &LayerCost| {
        (layer.input_gradient.expect("measured"), layer.weight_gradient.expect("measured"))
    };
    assert_eq!(halves(&measured[0]).0, 0.0, "nobody waits for it");
    assert_eq!(halves(&measured[1]).1, 0.0, "it has no weights");
    let (input, weight) = halves(&measured[2]);
    assert!(input > 0.0 && weight > 0.0, "{measured:?}");
    assert!(measured.iter().all(LayerCost::split_adds_up), "{measured:?}");
    let profile = Profile { layers: measured, ..Profile::default() };
    profile.check().expect("every time is one");
}

#[test]
fn a_layer_without_a_backward_takes_no_time_for_it() {
    let layers = Layers::new()
        .add_fn("same", |x| x.shallow_clone())
        .add_fn("tokens", |x| (x * 2).to_kind(Kind::Int64))
        .add("table", |p| nn::embedding(p, 20, 6, Default::default()))
        .add_fn("also the same", |x| x.shallow_clone());
    for batch in [Tensor::ones([3, 5], CPU), Tensor::ones([9, 5], (Kind::Int64, Device::Cpu))] {
        let measured = measure(&layers, &batch);
        assert!(measured[..2].iter().all(|layer| layer.backward == 0.0), "{measured:?}");
        assert_eq!((measured[0].activation_bytes, measured[3].activation_bytes), (0, 0));
        assert_eq!(measured[2].output_bytes, 5 * 6 * 4);
        assert_eq!(measured[2].parameter_bytes, 20 * 6 * 4);
    }
}

#[test]
fn no_more_than_one_layer_exists_at_a_time() {
    static ALIVE: AtomicUsize = AtomicUsize::new(0);
    #[derive(Debug)]
    struct Counted(nn::Linear);
    impl Drop for Counted {
        fn drop(&mut self) {
            ALIVE.fetch_sub(1, Ordering::SeqCst);
        }
    }
    impl nn::Module for Counted {
        fn forward(&self, x: &Tensor) -> Tensor {
            assert_eq!(ALIVE.load(Ordering::SeqCst), 1);
            self.0.forward(x)
        }
    }
    let build = |p: &Path| {
        ALIVE.fetch_add(1, Ordering::SeqCst);
        Counted(linear(8, 8)(p))
    };
    let layers = (0..5).fold(Layers::new(), |layers, k| layers.add(format!("fc{k}"), build));
    assert_eq!(measure(&layers, &Tensor::ones([2, 8], CPU)).len(), 5);
    assert_eq!(ALIVE.load(Ordering::SeqCst), 0);
}

#[test]
fn nothing_outside_is_touched() {
    let mine = Tensor::ones([256], CPU).set_requires_grad(true);
    let inner = Mutex::new(mine.shallow_clone());
    let layers = perceptron()
        .add_fn_t("drop", |x, train| x.dropout(0.5, train))
        .add_fn("mine", move |x| x.narrow(1, 0, 256) * &*inner.lock().expect("one thread"));
    let batch = Tensor::ones([8, 256], CPU).set_requires_grad(true);
    tch::manual_seed(7);
    let expected = Tensor::rand([4], CPU);
    tch::manual_seed(7);
    let arena = Arena::new("mine");
    let inside = arena.enter();
    let measured = tch::no_grad(|| balance::measure(&layers, Device::Cpu, &batch));
    measured.expect("a profile");
    drop(inside);
    assert_eq!(Tensor::rand([4], CPU), expected, "the generator stands where it stood");
    assert!(!mine.grad().defined() && !batch.grad().defined());
    assert_eq!(arena.current(), 0);
}

#[test]
fn doubles_are_measured_as_doubles() {
    let measured = measure(&perceptron(), &Tensor::ones([2, 256], (Kind::Double, Device::Cpu)));
    assert_eq!(measured[0].parameter_bytes, 257 * 64 * 8);
}

#[test]
fn errors_name_the_layer() {
    let refused = |layers: &Layers, batch: &Tensor| {
        profile(layers, batch).expect_err("no profile").to_string()
    };
    let batch = Tensor::ones([2, 256], CPU);
    let layers = perceptron().add("wrong", linear(5, 5));
    assert_eq!(
        refused(&layers, &batch),
        "layer 'wrong' could not be run on an input of shape [2, 4096]: mat1 and mat2 shapes \
         cannot be multiplied (2x4096 and 5x5)"
    );
    let layers = perceptron().add("huge", linear(4096, 1 << 45));
    assert!(refused(&layers, &batch).contains("layer 'huge'"), "{}", refused(&layers, &batch));
    let empty = profile(&perceptron(), &Tensor::ones([0, 256], CPU));
    assert_eq!(empty.expect_err("no samples"), Error::Batch(BatchError::Empty));
    let number = profile(&perceptron(), &Tensor::from(1.0));
    assert_eq!(number.expect_err("no rows"), Error::Batch(BatchError::LeafOfOneNumber { leaf: 0 }));
}

#[test]
fn skips_and_several_tensors_are_measured_too() {
    let layers = Layers::new()
        .stash("skip")
        .add("fc", linear(4, 4))
        .add_many("pair", |_| |x, _| vec![x[0].shallow_clone(), x[0].relu()])
        .add_many("sum", |_| |x, _| vec![&x[0] + &x[1]])
        .pop("join", "skip", |x, skip| Tensor::cat(&[x, skip], 1));
    let measured = measure(&layers, &Tensor::ones([16, 4], CPU));
    let bytes: Vec<u64> = measured.iter().map(|layer| layer.output_bytes).collect();
    assert_eq!(bytes, [16, 16, 32, 16, 32]);
}
