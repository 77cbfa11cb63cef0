//! A loss that compares every sample with every other: the mini-batch matters, not the micro-batch.
//!
//! `cargo run -p brimful --example contrastive`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::memory::{Arena, Memory};
use brimful::{MicroBatcher, MicroBatches, Result};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

const PAIRS: i64 = 256;

fn main() -> Result<()> {
    tch::manual_seed(0);
    let store = nn::VarStore::new(Device::Cpu);
    let encoder = nn::seq()
        .add(nn::linear(store.root() / "hidden", 32, 2048, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(store.root() / "output", 2048, 16, Default::default()));
    let encode = |x: &Tensor| {
        let y = encoder.forward(x);
        &y / y.norm_scalaropt_dim(2, [1], true)
    };
    let original = Tensor::randn([PAIRS, 32], (Kind::Float, Device::Cpu));
    let changed = &original + 0.1 * original.randn_like();

    // What a device with room for all pairs would do.
    let memory = Memory::Arena(Arena::new("device"));
    let (whole, expected) = {
        let _inside = memory.enter();
        let loss = contrast(&encode(&original), &encode(&changed));
        loss.backward();
        (loss.double_value(&[]), gradient(&store).copy())
    };
    let plain_peak = memory.usage()?.peak;
    store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
    memory.reset_peak()?;

    // Forward without graphs, the loss on all outputs, and each micro-batch again for its gradient.
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(32)).memory(memory);
    let step = micro.backward_whole(
        &(original, changed),
        |(a, b)| (encode(&a), encode(&b)),
        |(a, b)| contrast(a, b),
    )?;

    let error = (gradient(&store) - &expected).abs().max() / expected.abs().max();
    let error = error.double_value(&[]);
    assert!((step.loss - whole).abs() < 1e-5, "the loss is {}, not {whole}", step.loss);
    assert!(error < 1e-4, "the gradient is off by {error:e}");
    println!("{PAIRS} pairs at once:   loss {whole:.5} at a peak of {plain_peak}");
    println!(
        "in micro-batches: loss {:.5} at a peak of {}",
        step.loss,
        step.peak().unwrap_or_default()
    );
    println!("each pair was compared with all {PAIRS}; the gradient is off by {error:.0e}");
    Ok(())
}

/// InfoNCE: of all changed ones, each original is to find its own.
fn contrast(originals: &Tensor, changed: &Tensor) -> Tensor {
    let likeness = originals.matmul(&changed.tr()) / 0.1;
    let own = Tensor::arange(originals.size()[0], (Kind::Int64, Device::Cpu));
    likeness.cross_entropy_for_logits(&own)
}

fn gradient(store: &nn::VarStore) -> Tensor {
    store.variables()["hidden.weight"].grad()
}
