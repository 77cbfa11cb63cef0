//! A U-Net in three stages: skip connections go straight from where they are stashed to where they
//! are popped, past the stages between.
//!
//! `cargo run -p brimful-models --example unet_skips`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::optim::{Optimizer, Sgd};
use brimful::{Loss, MicroBatcher, MicroBatches, Pipeline, Result};
use brimful_models::UNet;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

fn loss(logits: Tensor, mask: &Tensor) -> Loss {
    let none = None::<&Tensor>;
    Loss::mean(logits.binary_cross_entropy_with_logits(mask, none, none, tch::Reduction::Mean))
}

fn main() -> Result<()> {
    tch::manual_seed(0);
    let layers = UNet { dropout: 0.0, ..UNet::new(2, 4) }.layers().expect("an even width");
    let mut pipe = Pipeline::builder(layers.clone())
        .devices([Device::Cpu; 3])
        .balance([15, 14, 14])
        .micro_batches(MicroBatches::Count(3))
        .kind(Kind::Double)
        .build()?;

    let mut ends = Vec::new(); // one past each stage's last layer
    for &size in pipe.balance().sizes() {
        ends.push(ends.last().unwrap_or(&0) + size);
    }
    let stage_of = |layer: usize| ends.iter().filter(|&&end| end <= layer).count();
    let names: Vec<_> = layers.names().collect();
    for (stash, pop) in layers.skips()? {
        let (from, to) = (stage_of(stash), stage_of(pop));
        let (name, by) = (names[stash], names[pop]);
        println!("{name}: stashed on stage {from}, popped on stage {to} by {by}");
    }

    // The plain model, with the pipeline's values.
    let mut store = VarStore::new(Device::Cpu);
    let plain = layers.build(&store.root())?;
    store.double();
    let mut variables = store.variables();
    for (name, value) in pipe.variables()? {
        tch::no_grad(|| variables.get_mut(&name).expect("the same names").copy_(&value));
    }

    let images = Tensor::randn([6, 3, 64, 64], (Kind::Double, Device::Cpu));
    let masks = images.narrow(1, 0, 1).gt(0.0).to_kind(Kind::Double);
    let mut stages = pipe.optimizer(Sgd::new(0.05))?;
    let mut whole = Optimizer::new(&store, Sgd::new(0.05))?;
    let mut micro = MicroBatcher::new(&store, MicroBatches::Count(1));
    let batch = (images, masks);
    for number in 0..3 {
        let ours = pipe.backward(&batch.0, &batch.1, loss)?;
        let expected = micro.backward(&batch, |(x, y)| loss(plain.forward_t(&x, true), &y))?;
        println!("step {number}: loss {:.6}, plain {:.6}", ours.loss, expected.loss);
        assert!((ours.loss - expected.loss).abs() < 1e-10, "the losses part");
        stages.step()?;
        stages.zero_grad()?;
        whole.step()?;
        whole.zero_grad()?;
    }
    println!("{} skips across three stages, and the plain model's losses", layers.skips()?.len());
    Ok(())
}
