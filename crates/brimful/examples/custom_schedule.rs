//! A schedule of one's own, as text: checked, simulated, drawn, and run as it stands.
//!
//! `cargo run -p brimful --example custom_schedule`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::schedule::{Actions, Costs, Recompute, Schedule, render, simulate};
use brimful::{Layers, Loss, MicroBatches, Pipeline, Result};
use tch::{Device, Kind, Tensor, nn};

/// A line a device; `1F0` is stage 1, forward, micro-batch 0. The backwards run last to first, as
/// torchgpipe's do.
const MINE: &str = "
    0F0, 0F1, 0F2,                     0B2, 0B1, 0B0
         1F0, 1F1, 1F2,           1B2, 1B1, 1B0
              2F0, 2F1, 2F2, 2B2, 2B1, 2B0
";

fn main() -> Result<()> {
    tch::manual_seed(0);
    // A list that would wait for ever does not get as far as running.
    let error = "0B0,0F0".parse::<Actions>().expect_err("no backward before its forward");
    println!("{error}\n");

    let mine: Actions = MINE.parse()?;
    println!("{}", render::grid(&mine));
    let usual = Schedule::OneFOneB.actions(3, 3, Recompute::Never)?;
    for (name, actions) in [("mine", &mine), ("1F1B", &usual)] {
        let simulation = simulate(actions, &Costs::ticks(3))?;
        let held: Vec<_> = simulation.devices().iter().map(|device| device.peak_held).collect();
        let (ticks, bubble) = (simulation.makespan(), simulation.bubble() * 100.0);
        println!("{name}: {ticks} ticks, bubble {bubble:.0} %, micro-batches held {held:?}");
    }

    let layers = (0..3).fold(Layers::new(), |layers, number| {
        layers.add(format!("linear{number}"), |p| nn::linear(p, 16, 16, Default::default()))
    });
    let mut pipe = Pipeline::builder(layers)
        .devices([Device::Cpu; 3])
        .micro_batches(MicroBatches::Count(3))
        .build()?;
    let x = Tensor::randn([12, 16], (Kind::Float, Device::Cpu));
    let loss = |out: Tensor, x: &Tensor| Loss::mean(out.mse_loss(x, tch::Reduction::Mean));

    let expected = pipe.backward(&x, &x, loss)?;
    let gradients = pipe.gradients()?;
    pipe.zero_grad()?;
    pipe.set_actions(mine.clone())?;
    let step = pipe.backward(&x, &x, loss)?;

    let spans = step.timeline.map(|timeline| timeline.spans).unwrap_or_default();
    let ran: Vec<Vec<_>> =
        spans.iter().map(|spans| spans.iter().map(|span| span.action).collect()).collect();
    assert_eq!(ran, mine.lists(), "what ran is what was written");
    assert!((step.loss - expected.loss).abs() < 1e-6);
    for ((name, ours), (_, theirs)) in pipe.gradients()?.iter().zip(&gradients) {
        assert!(ours.allclose(theirs, 1e-5, 1e-7, false), "{name} differs");
    }
    println!("the list ran as written, and left the gradients that 1F1B leaves");
    Ok(())
}
