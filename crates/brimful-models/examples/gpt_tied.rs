//! A GPT whose head uses the table of its embedding, with the two on different stages: one variable.
//!
//! `cargo run -p brimful-models --example gpt_tied`
#![allow(clippy::print_stdout)] // Printing is what this program is for.

use brimful::optim::AdamW;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Loss, MicroBatches, Pipeline, save};
use brimful_models::{Gpt, gpt};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tch::manual_seed(0);
    let (layers, width, heads, context, vocabulary) = (4, 32, 4, 16, 20);
    let config = Gpt { layers, width, heads, context, vocabulary, dropout: 0.1, tied: true };
    let layers = gpt(&config);
    let untied = gpt(&Gpt { tied: false, ..config }).parameter_count()?;
    println!("{} parameters; {untied} were the head not tied", layers.parameter_count()?);

    let mut pipe = Pipeline::builder(layers)
        .devices([Device::Cpu; 2])
        .balance([5, 4]) // wte is on stage 0, lm_head on stage 1
        .micro_batches(MicroBatches::Count(4))
        .schedule(Schedule::OneFOneB)
        .recompute(Recompute::ExceptLast) // draws the same dropout masks again
        .build()?;
    let mut optimizer = pipe.optimizer(AdamW::new(1e-2))?;

    // To learn: each token is followed by the next number.
    let tokens = Tensor::randint(vocabulary, [32, 1], (Kind::Int64, Device::Cpu));
    let counting = Tensor::arange(context + 1, (Kind::Int64, Device::Cpu));
    let text = (tokens + counting).remainder(vocabulary);
    let (x, y) = (text.narrow(1, 0, context), text.narrow(1, 1, context));
    let mut losses = Vec::new();
    for _ in 0..30 {
        let step = pipe.backward(&x, &y, |logits: Tensor, y| {
            Loss::mean(logits.flatten(0, 1).cross_entropy_for_logits(&y.flatten(0, 1)))
        })?;
        optimizer.clip_gradient_norm(1.0)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(step.loss);
    }
    println!("loss {:.3} at first, {:.3} after {} steps", losses[0], losses[29], losses.len());
    assert!(losses[29] < 0.5 * losses[0], "it learns");

    let file = std::env::temp_dir().join(format!("gpt-{}.safetensors", std::process::id()));
    pipe.save(&file)?;
    let (saved, _) = save::read(&file)?;
    std::fs::remove_file(&file)?;
    let tables: Vec<_> = (saved.iter())
        .filter(|(_, tensor)| tensor.size() == [vocabulary, width])
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(tables, ["wte.weight"], "one table, in training and in the file");
    println!("both stages train one table, which is saved once, as {}", tables[0]);
    Ok(())
}
