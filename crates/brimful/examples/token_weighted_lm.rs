//! A language model on padded sentences: a mean over tokens is not the mean of micro-batches' means.
//!
//! `cargo run -p brimful --example token_weighted_lm`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::{Loss, MicroBatcher, MicroBatches, Result};
use tch::nn::{self, Module};
use tch::{Device, Kind, Reduction, Tensor};

const SENTENCES: i64 = 30;
const LONGEST: i64 = 24;
const VOCABULARY: i64 = 50;
/// A target that is none.
const PADDING: i64 = -100;

fn main() -> Result<()> {
    tch::manual_seed(0);
    let store = nn::VarStore::new(Device::Cpu);
    let model = nn::seq()
        .add(nn::embedding(store.root() / "table", VOCABULARY, 16, Default::default()))
        .add(nn::linear(store.root() / "head", 16, VOCABULARY, Default::default()));
    let tokens = Tensor::randint(VOCABULARY, [SENTENCES, LONGEST], (Kind::Int64, Device::Cpu));
    let targets = padded(&tokens.roll([-1], [1]));

    // The mean over all tokens that are none of padding.
    let mean = |tokens: &Tensor, targets: &Tensor| {
        let (logits, targets) = (model.forward(tokens).flatten(0, 1), targets.flatten(0, 1));
        logits.cross_entropy_loss::<Tensor>(&targets, None, Reduction::Mean, PADDING, 0.0)
    };
    let expected = mean(&tokens, &targets).double_value(&[]);

    let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(4));
    let batch = (tokens, targets);
    let by_samples = micro.evaluate(&batch, |(x, y)| Loss::mean(mean(&x, &y)))?;
    let by_tokens = micro.backward(&batch, |(x, y)| {
        // The count stays on the device until the step's end: nothing waits for it.
        let count = y.ne(PADDING).sum(Kind::Float);
        Loss::mean_over(mean(&x, &y), count)
    })?;

    let off = |loss: f64| (loss / expected - 1.0).abs();
    println!("the whole batch's loss        {expected:.6}");
    println!(
        "averaged over sentences       {:.6}  off by {:.1e}",
        by_samples.loss,
        off(by_samples.loss)
    );
    println!(
        "averaged over tokens          {:.6}  off by {:.1e}",
        by_tokens.loss,
        off(by_tokens.loss)
    );
    assert!(off(by_tokens.loss) < 1e-6, "Loss::mean_over is not the whole batch's mean");
    assert!(off(by_samples.loss) > 1e-4, "sentences of unlike length should have shown");
    println!("Loss::mean_over weighs each micro-batch by its tokens, and so is exact");
    Ok(())
}

/// Sentences of 1 to 24 tokens, short ones first, so that micro-batches have unlike lengths.
fn padded(targets: &Tensor) -> Tensor {
    let places = Tensor::arange(LONGEST, (Kind::Int64, Device::Cpu)).unsqueeze(0);
    let lengths = Tensor::arange(SENTENCES, (Kind::Int64, Device::Cpu)).unsqueeze(1);
    let lengths = (lengths * LONGEST).divide_scalar_mode(SENTENCES, "floor") + 1;
    targets.masked_fill(&places.ge_tensor(&lengths), PADDING)
}
