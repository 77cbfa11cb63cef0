//! Channels last in memory: the same gradients, the same optimizer, the same file.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same bodies on a GPU, `BRIMFUL_TEST_REPLAY=1` with replay.

mod support;

use brimful::micro::Layout;
use brimful::nn::batch_norm2d;
use brimful::optim::{AdamW, Optimizer};
use brimful::save::{self, Metadata};
use brimful::{Loss, MicroBatcher, Size};
use support::{micro_batcher, numbers, test_device};
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

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
        for (name, mut variable) in store.variables() {
            if variable.requires_grad() {
                tch::no_grad(|| variable.copy_(&numbers(&variable.size(), name.len() as i64)));
            }
        }
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
        self.optimizer.step().expect("an update");
        self.optimizer.zero_grad().expect("no gradients");
        loss
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        let mut all: Vec<_> = self.store.variables().into_iter().collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
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
    for layout in [Layout::ChannelsLast, Layout::Measured] {
        let [mut plain, mut laid_out] = [(); 2].map(|()| ConvNet::new());
        let mut one = MicroBatcher::new(&plain.store, Size::Fixed(4));
        let mut two = micro_batcher(&laid_out.store, Size::Fixed(4)).layout(layout);
        for step in 0..8 {
            let samples = batch(step);
            let (a, b) = (plain.step(&mut one, &samples), laid_out.step(&mut two, &samples));
            assert!((a - b).abs() < 1e-9 * a.abs(), "{layout:?} step {step}: {a} {b}");
        }
        for ((name, a), (_, b)) in plain.variables().iter().zip(laid_out.variables()) {
            let error = (a - &b).abs().max().double_value(&[]);
            assert!(error < 1e-8, "{layout:?} {name}: {error:e}");
        }
        let weight = &laid_out.store.variables()["two.weight"];
        assert_eq!(is_channels_last(weight), two.is_channels_last());
        assert!(layout == Layout::Measured || two.is_channels_last());
    }
}

#[test]
fn a_saved_model_does_not_tell() {
    let [mut plain, mut laid_out] = [(); 2].map(|()| ConvNet::new());
    let mut one = MicroBatcher::new(&plain.store, Size::Count(1));
    let mut two = MicroBatcher::new(&laid_out.store, Size::Count(1)).layout(Layout::ChannelsLast);
    let samples = batch(0);
    plain.step(&mut one, &samples);
    laid_out.step(&mut two, &samples);
    let path = std::env::temp_dir().join(format!("brimful-layout-{}", std::process::id()));
    save::write(&path, &laid_out.variables(), &Metadata::new()).expect("written");
    let (read, _) = save::read(&path).expect("read");
    std::fs::remove_file(&path).expect("removed");
    for ((name, expected), (_, got)) in plain.variables().iter().zip(read) {
        let error = (expected.to_device(Device::Cpu) - got).abs().max().double_value(&[]);
        assert!(error < 1e-9, "{name}: {error:e}");
    }
}

#[test]
fn a_closure_that_asks_for_a_view_runs_as_before() {
    let store = VarStore::new(test_device());
    let convolution = nn::conv2d(store.root(), 3, 4, 3, Default::default());
    let mut micro = micro_batcher(&store, Size::Fixed(4)).layout(Layout::Measured);
    let samples = numbers(&[16, 3, 6, 6], 1).to_kind(Kind::Float);
    for _ in 0..8 {
        let step = micro.backward(&samples, |x: Tensor| {
            let out = x.apply(&convolution);
            // Channels last, these rows are not in one piece.
            Loss::mean(out.view([out.size()[0], -1]).square().mean(Kind::Float))
        });
        assert!(step.expect("a step").loss.is_finite());
    }
    assert!(!micro.is_channels_last());
    assert!(store.variables()["weight"].is_contiguous());
}

#[test]
fn a_model_without_convolutions_is_left_alone() {
    let store = VarStore::new(test_device());
    let linear = nn::linear(store.root(), 6, 4, Default::default());
    let mut micro = micro_batcher(&store, Size::Fixed(4)).layout(Layout::ChannelsLast);
    let samples = numbers(&[16, 6], 1).to_kind(Kind::Float);
    micro
        .backward(&samples, |x: Tensor| Loss::mean(x.apply(&linear).square().mean(Kind::Float)))
        .expect("a step");
    assert!(!micro.is_channels_last());
}
