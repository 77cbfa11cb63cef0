//! A batch of one's own: `#[derive(Batch)]` cuts every field along its first dimension.
//!
//! `cargo run -p brimful --example struct_batch`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::{Batch, Loss, MicroBatcher, MicroBatches, Result, batch};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

/// Pictures with captions, some of them weighted.
#[derive(Batch)]
struct Captioned {
    pictures: Tensor,
    captions: Vec<Tensor>,
    weights: Option<Tensor>,
    /// Shared by all micro-batches, as numbers and strings always are.
    #[batch(shared)]
    colours: Tensor,
    source: String,
}

fn main() -> Result<()> {
    tch::manual_seed(0);
    let float = (Kind::Float, Device::Cpu);
    let mini_batch = Captioned {
        pictures: Tensor::randn([10, 3, 8, 8], float),
        captions: vec![Tensor::randn([10, 16], float), Tensor::randn([10, 16], float)],
        weights: Some(Tensor::rand([10], float)),
        colours: Tensor::rand([3, 1, 1], float),
        source: "made up".into(),
    };
    println!("{} samples from '{}'", batch::len(&mini_batch)?, mini_batch.source);

    let store = nn::VarStore::new(Device::Cpu);
    let see = nn::linear(store.root() / "see", 3 * 8 * 8, 16, Default::default());
    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(4));
    let mut seen = Vec::new();
    let step = micro.backward(&mini_batch, |part| {
        let Captioned { pictures, captions, weights, colours, .. } = part;
        seen.push((pictures.size()[0], captions[1].size()[0], colours.size()[0]));
        let pictures = see.forward(&(pictures * colours).flatten(1, -1));
        let distances = (pictures - &captions[0] - &captions[1]).square().sum_dim_intlist(
            &[1_i64][..],
            false,
            Kind::Float,
        );
        let distances = distances * weights.expect("the mini-batch has weights");
        // Whatever the closure gives beside its loss comes back joined, in sample order.
        (Loss::mean(distances.mean(Kind::Float)), distances)
    })?;

    let mean = step.outputs.mean(Kind::Float).double_value(&[]);
    assert!((step.loss - mean).abs() < 1e-5 * mean, "the loss is {}, not {mean}", step.loss);
    assert_eq!(seen, [(4, 4, 3), (3, 3, 3), (3, 3, 3)]);
    println!(
        "cut into {:?}, every field alike, colours whole; {} distances came back, mean {mean:.2}",
        step.sizes,
        step.outputs.size()[0]
    );
    Ok(())
}
