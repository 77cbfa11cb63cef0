//! Bounded: at a fixed micro-batch size, a longer mini-batch needs no more memory.

use brimful::nn::{BatchNormConfig, BatchNormPolicy, batch_norm1d};
use brimful::{Layers, MicroBatches, World};
use tch::nn;

use crate::kinds::{Make, Setup};
use crate::plain::{MEAN, samples};

/// Wide enough that a micro-batch's activations dominate the memory.
const WIDTH: i64 = 128;
/// Micro-batches of a short mini-batch: more than a pipeline of two stages holds at a time.
const FEW: i64 = 8;
const SIZE: i64 = 8;
/// Limit of each memory, beside the model: sufficient for engines that do not keep the whole mini-batch.
const LIMIT: u64 = 900 << 10;
/// Part of it for the rows of deferred statistics, 65,536 numbers of f64; exact BatchNorms have none.
const ROWS: u64 = 512 << 10;
/// Allows one gradient more or less in flight between stages. Without a bound the ratio would be 8.
const MOST: f64 = 1.3;

fn wide(policy: BatchNormPolicy) -> Layers {
    let hidden = |number: usize| format!("hidden {number}");
    let layers = Layers::new().add("in", |p| nn::linear(p, 4, WIDTH, Default::default()));
    let layers = (0..6).fold(layers, |layers, number| layers.add_fn(hidden(number), |x| x.tanh()));
    let config = BatchNormConfig { policy, ..Default::default() };
    let layers = layers.add_norm("norm", move |p| batch_norm1d(p, WIDTH, config));
    layers.add("out", |p| nn::linear(p, WIDTH, 3, Default::default()))
}

pub fn holds(make: Make, world: &World) {
    let size = MicroBatches::Samples(SIZE as usize);
    let peaks = |micro_batches: i64| {
        let within = |limit| make(&Setup { limit: Some(limit), ..Setup::new(wide, size, world) });
        let mut engine = within(LIMIT);
        if engine.about().is_exact {
            engine = within(LIMIT - ROWS);
        }
        // Each part of a mini-batch has this many micro-batches.
        let batch = samples(micro_batches * SIZE * engine.about().dealt(100).len() as i64, 10);
        engine.backward(&batch, &MEAN.loss()).expect("a first step, which makes the gradients");
        let step = engine.backward(&batch, &MEAN.loss()).expect("a step");
        assert_eq!(step.sizes.len() as i64, micro_batches * engine.about().own.len() as i64);
        (engine.about().name, step.peaks)
    };
    let ((name, few), (_, many)) = (peaks(FEW), peaks(8 * FEW));
    for (few, many) in few.into_iter().zip(many) {
        let (few, many) = (few.expect("counted").0 as f64, many.expect("counted").0 as f64);
        assert!(many <= few * MOST, "{name}: {few} bytes, and {many} for 8 times the samples");
    }
}
