//! Overhead of the executor: a step whose stages do next to nothing, an action at a time.
//!
//! Each stage adds a number to one value, so that there is a gradient to pass on. What libtorch and
//! the loss take is in the plain micro-batched step of one such layer. The difference to that is the
//! executor's. All are divided by the number of actions of a device (2 m).
//!
//! `cargo bench -p brimful --bench pipeline`

#![allow(clippy::print_stdout)] // Printing is what this program is for.

mod timing;

use brimful::schedule::Schedule;
use brimful::{DeviceSpec, Layers, Loss, MicroBatcher, MicroBatches, Pipeline, Result};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};
use timing::report;

const MICRO_BATCHES: usize = 64;
const ACTIONS: u32 = 2 * MICRO_BATCHES as u32;

fn empty(stages: usize) -> Layers {
    (0..stages).fold(Layers::new(), |layers, j| {
        layers.add(j.to_string(), |p| {
            let number = p.zeros("number", &[1]);
            nn::func(move |x| x + &number)
        })
    })
}

fn main() -> Result<()> {
    timing::heading();
    let x = Tensor::ones([MICRO_BATCHES as i64, 1], (Kind::Float, Device::Cpu));
    let store = nn::VarStore::new(Device::Cpu);
    let model = empty(1).build(&store.root())?;
    let mut micro = MicroBatcher::new(&store, MicroBatches::Count(MICRO_BATCHES));
    report("plain", ACTIONS, || {
        let step = micro.backward(&x, |x| Loss::sum(model.forward_t(&x, true).sum(Kind::Float)));
        step.expect("a step")
    });
    for stages in [1, 2, 4] {
        let mut pipe = Pipeline::builder(empty(stages))
            .devices((0..stages).map(|_| DeviceSpec::cpu().threads(1)))
            .micro_batches(MicroBatches::Count(MICRO_BATCHES))
            .schedule(Schedule::OneFOneB)
            .build()?;
        report(&format!("1f1b/{stages}"), ACTIONS, || {
            let step = pipe.backward(&x, &x, |out: Tensor, _| Loss::sum(out.sum(Kind::Float)));
            step.expect("a step")
        });
    }
    Ok(())
}
