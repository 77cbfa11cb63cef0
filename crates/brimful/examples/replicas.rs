//! Trains one model on several devices, each with its part of the mini-batch: the step equals the plain model's.
//!
//! `cargo run -p brimful --example replicas`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::optim::{Optimizer, Sgd};
use brimful::{DeviceSpec, Loss, MicroBatcher, MicroBatches, Replicas, Result};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

fn build(root: &nn::Path) -> nn::Sequential {
    nn::seq()
        .add(nn::linear(root / "hidden", 32, 256, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(root / "output", 256, 10, Default::default()))
}

fn loss(model: &nn::Sequential, x: &Tensor, y: &Tensor) -> Loss {
    Loss::mean(model.forward(x).cross_entropy_for_logits(y))
}

fn main() -> Result<()> {
    // On a GPU machine: [Device::Cuda(0), Device::Cuda(1)]. The second one here counts as slower.
    tch::manual_seed(0);
    let devices = [DeviceSpec::cpu().threads(1), DeviceSpec::cpu().threads(1)];
    let mut replicas = Replicas::new(devices, MicroBatches::Samples(32), build)?;
    replicas.set_speeds(&[2.0, 1.0])?;
    let mut optimizer = Optimizer::new(replicas.store(), Sgd::new(0.1).momentum(0.9))?;

    // The plain model starts with the same values, from the same seed.
    tch::manual_seed(0);
    let store = nn::VarStore::new(Device::Cpu);
    let plain = build(&store.root());
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(32));
    let mut expected = Optimizer::new(&store, Sgd::new(0.1).momentum(0.9))?;

    let x = Tensor::randn([200, 32], (Kind::Float, Device::Cpu));
    let y = Tensor::randint(10, [200], (Kind::Int64, Device::Cpu));
    let batch = (x, y);
    for number in 0..4 {
        let step = replicas.backward(&batch, |model, (x, y)| loss(model, &x, &y))?;
        let alone = micro.backward(&batch, |(x, y)| loss(&plain, &x, &y))?;
        println!(
            "step {number}: parts {:?}, loss {:.6}, plain {:.6}",
            step.shares, step.loss, alone.loss
        );
        for optimizer in [&mut optimizer, &mut expected] {
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
    }

    let here = replicas.store().variables();
    let off = |(name, value): (String, Tensor)| (&here[&name] - value).abs().max();
    let worst = store.variables().into_iter().map(|v| off(v).double_value(&[])).fold(0.0, f64::max);
    assert!(worst < 1e-5, "the parameters differ by {worst:e}");
    println!("two replicas trained the plain model, to {worst:.0e}");
    Ok(())
}
