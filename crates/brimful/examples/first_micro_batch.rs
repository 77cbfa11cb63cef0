//! A batch that does not fit, cut into micro-batches that do: the gradient is the full batch's.
//!
//! `cargo run -p brimful --example first_micro_batch`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::memory::{Arena, Memory};
use brimful::{Bytes, Loss, MicroBatcher, MicroBatches, Result, internal};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

fn main() -> Result<()> {
    tch::manual_seed(0);
    let store = nn::VarStore::new(Device::Cpu);
    let model = nn::seq()
        .add(nn::linear(store.root() / "hidden", 64, 512, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(store.root() / "output", 512, 10, Default::default()));
    let x = Tensor::randn([4096, 64], (Kind::Float, Device::Cpu));
    let y = Tensor::randint(10, [4096], (Kind::Int64, Device::Cpu));
    let loss = |x: &Tensor, y: &Tensor| model.forward(x).cross_entropy_for_logits(y);

    // The gradient to compare with, where there is room for all 4096 samples.
    loss(&x, &y).backward();
    let expected = gradients(&store);

    // A "device" of 4 MiB: CPU memory that is counted, and that ends there.
    let device = Arena::limited("device", 4 << 20)?;
    let whole = {
        let _inside = device.enter();
        internal::catch(|| loss(&x, &y).f_backward())
    };
    assert!(whole.is_err(), "the whole batch fits, so there is nothing to show");
    println!("4096 samples at once in {}: out of memory", Bytes(4 << 20));

    // The same in micro-batches. The closure gets each one, and says what its loss is a mean over.
    clear(&store);
    let mut micro =
        MicroBatcher::new(&store, MicroBatches::Samples(256)).memory(Memory::Arena(device));
    let step = micro.backward(&(x, y), |(x, y)| Loss::mean(loss(&x, &y)))?;

    let error = difference(&gradients(&store), &expected);
    assert!(error < 1e-5, "the gradient is off by {error:e}");
    println!(
        "4096 samples, {} at a time, in {}: the full batch's gradient, to {error:.0e} of it",
        step.sizes[0],
        step.peak().unwrap_or_default()
    );
    Ok(())
}

fn gradients(store: &nn::VarStore) -> Vec<Tensor> {
    store.trainable_variables().iter().map(|variable| variable.grad().copy()).collect()
}

fn clear(store: &nn::VarStore) {
    store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
}

/// The largest difference of any element, over the largest element.
fn difference(ours: &[Tensor], expected: &[Tensor]) -> f64 {
    let most = |tensor: &Tensor| tensor.abs().max().double_value(&[]);
    let off = ours.iter().zip(expected).map(|(a, b)| most(&(a - b))).fold(0.0, f64::max);
    off / expected.iter().map(most).fold(0.0, f64::max)
}
