//! A size that nobody tunes: found while it trains, lowered when memory gets short, the batch as is.
//!
//! `cargo run -p brimful --example auto_size`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::memory::{Arena, Memory};
use brimful::optim::{Optimizer, Sgd};
use brimful::{Bytes, Loss, MicroBatcher, MicroBatches, Result};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

fn main() -> Result<()> {
    tch::manual_seed(0);
    let device = Arena::limited("device", 24 << 20)?;
    let store = nn::VarStore::new(Device::Cpu);
    let model = nn::seq()
        .add(nn::linear(store.root() / "hidden", 64, 1024, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(store.root() / "output", 1024, 64, Default::default()));
    let mut optimizer = Optimizer::new(&store, Sgd::new(0.1))?;
    let mut micro =
        MicroBatcher::new(&store, MicroBatches::Auto).memory(Memory::Arena(device.clone()));
    let x = Tensor::randn([8192, 64], (Kind::Float, Device::Cpu));

    let mut losses = Vec::new();
    for number in 0..6 {
        if number == 3 {
            // Somebody else takes most of the device's memory.
            device.set_limit(Some(device.current() + (3 << 20)))?;
            println!("          from here on, 3 MiB are left");
        }
        let step = micro.backward(&x, |x| {
            let off = model.forward(&x) - x;
            Loss::mean(off.square().mean(Kind::Float))
        })?;
        for decision in &step.decisions {
            println!("          {decision}");
        }
        let largest = step.sizes.iter().max().copied().unwrap_or_default();
        println!(
            "step {number}    loss {:.5}, {} samples, up to {largest} at a time, peak {}",
            step.loss,
            step.samples,
            step.peak().unwrap_or_default()
        );
        assert_eq!(step.samples, 8192, "the mini-batch never changes");
        assert!(step.peak() <= device.limit().map(Bytes), "the limit holds");
        losses.push(step.loss);
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    assert!(losses.is_sorted_by(|before, after| before > after), "it learns: {losses:?}");
    println!(
        "6 steps of 8192 samples each, with 24 MiB and then 3 MiB, and no size in the program"
    );
    Ok(())
}
