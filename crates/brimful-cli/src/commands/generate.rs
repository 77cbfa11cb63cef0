//! `brimful generate`: writes text with a trained language model, token by token.

mod writer;

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use tch::{Kind, Tensor};

use crate::exit::{Exit, ensure_use};
use crate::generation_config::Sampling;
use crate::setting::{ModelSource, NumberType, TEXT_MODELS, words};
use crate::tokenizer::Tokenizer;
use crate::{output, progress};
use writer::Writer;

/// Options of `brimful generate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful train --model gpt --data book.txt --save gpt.safetensors
  brimful generate --weights gpt.safetensors --prompt 'Once upon a time'
  brimful generate --weights gpt.safetensors --prompt 'Once' --temperature 0.8 --top-k 20 --seed 7
  brimful generate --weights gpt.safetensors --prompt 'Once' --temperature 0   greedy
  brimful generate --model ./llama --prompt 'Once' --dtype f32         a Hugging Face folder
  brimful generate --model ./llama --adapter llama-book --from-host --prompt 'Once'
                                                      with LoRA, from host memory")]
pub struct GenerateOptions {
    /// Weights: a file of train --save, or any safetensors file
    ///
    /// In any other file, the tensors must have the names of the model's variables
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    #[arg(long, value_name = "MODEL")]
    #[arg(help = "Model: gpt, gpt2, … or a Hugging Face folder [default: stored in the file]")]
    #[arg(long_help = format!("{TEXT_MODELS} [default: stored in the file]"))]
    model: Option<ModelSource>,
    /// LoRA adapter: a folder written by train --save or PEFT
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// Keep the weights in host memory, and copy one layer at a time to the device
    #[arg(long)]
    from_host: bool,
    /// Prompt: beginning of the text
    #[arg(long, value_name = "TEXT", default_value = "\n", hide_default_value = true)]
    prompt: String,
    /// Number of tokens to generate, at most
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = words::count)]
    tokens: usize,
    /// Sampling temperature, 0 for greedy [default: the model's, else 1]
    ///
    /// A folder's generation_config.json has the model's temperature, top-k and top-p
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Sample from the K most probable tokens [default: the model's, else all]
    #[arg(long, value_name = "K", value_parser = words::count)]
    top_k: Option<usize>,
    /// Sample from the top tokens of probability P [default: the model's, else 1]
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    #[arg(long, value_name = "N", default_value_t = 0, help = words::SEED)]
    seed: u64,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    #[arg(long, value_enum, help = format!("{} [default: stored in the file]", words::DTYPE))]
    dtype: Option<NumberType>,
}

/// Prints the prompt, and then the text, token by token as the model generates it.
pub(crate) fn run(options: &GenerateOptions) -> Result<Exit> {
    options.check()?;
    let mut writer = Writer::open(options)?;
    let sampling = options.sampling(writer.sampling);
    tch::manual_seed(i64::from_ne_bytes(options.seed.to_ne_bytes()));
    let mut tokens = std::mem::take(&mut writer.prompt);
    let (length, context) = (tokens.len(), writer.context());
    if length > context {
        progress::say(&format!(
            "brimful: the prompt has {length} tokens, and the model takes {context}: it sees the last {context} alone"
        ));
    }
    let mut text = GrowingText::after(&tokens, &writer.tokenizer)?;
    output::piece(&options.prompt)?;
    for _ in 0..options.tokens {
        let logits = writer.next(&tokens)?;
        let token = choose(&logits, &sampling).int64_value(&[0]);
        if writer.ends.contains(&token) {
            break;
        }
        tokens.push(token);
        output::piece(text.grown(&tokens, &writer.tokenizer)?)?;
    }
    output::line(text.rest())?;
    Ok(Exit::Done)
}

impl GenerateOptions {
    fn check(&self) -> Result<()> {
        if let Some(temperature) = self.temperature {
            ensure_use!(
                temperature.is_finite() && temperature >= 0.0,
                "--temperature {temperature}: give a number from 0 on"
            );
        }
        if let Some(top_p) = self.top_p {
            ensure_use!(
                top_p > 0.0 && top_p <= 1.0,
                "--top-p {top_p}: give a number above 0, 1 at most"
            );
        }
        ensure_use!(!self.prompt.is_empty(), "--prompt is empty: give it a character");
        Ok(())
    }

    /// Returns the sampling parameters that the flags give. For a flag that is not given, takes the folder's
    /// parameter.
    fn sampling(&self, told: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(told.temperature),
            top_k: self.top_k.or(told.top_k),
            top_p: self.top_p.unwrap_or(told.top_p),
        }
    }
}

/// Chooses a token by the logits: the likeliest token, or a token sampled with temperature, top-k and top-p.
fn choose(logits: &Tensor, sampling: &Sampling) -> Tensor {
    let Sampling { temperature, top_k, top_p } = *sampling;
    if temperature == 0.0 {
        return logits.argmax(-1, true);
    }
    let count = top_k.map_or(logits.numel(), |k| k.min(logits.numel()));
    let (values, tokens) = logits.topk(count as i64, -1, true, true);
    // Subtracts the largest logit first, because a large logit divided by a tiny temperature would overflow.
    let chances = ((&values - values.max()) / temperature).softmax(-1, Kind::Double);
    // Drops a token if the probabilities of the likelier tokens already add up to `top_p`.
    let before = chances.cumsum(-1, Kind::Double) - &chances;
    let chances = if top_p < 1.0 { &chances * before.lt(top_p) } else { chances };
    tokens.index_select(0, &chances.multinomial(1, false))
}

/// Text that grows token by token. It remembers how much is printed, so that each part is printed once.
#[derive(Debug)]
struct GrowingText {
    text: String,
    /// Number of bytes already printed.
    shown: usize,
}

impl GrowingText {
    /// Starts with the text of these tokens, which is already printed.
    fn after(tokens: &[i64], tokenizer: &Tokenizer) -> Result<Self> {
        let text = tokenizer.decode(tokens)?;
        Ok(Self { shown: text.len(), text })
    }

    /// Returns the text not yet printed, or nothing while the text ends in the middle of a character.
    fn grown(&mut self, tokens: &[i64], tokenizer: &Tokenizer) -> Result<&str> {
        self.text = tokenizer.decode(tokens)?;
        let is_broken_off = self.text.ends_with(char::REPLACEMENT_CHARACTER);
        Ok(if is_broken_off { "" } else { self.rest() })
    }

    /// Returns the text not yet printed, even if it ends in the middle of a character.
    fn rest(&mut self) -> &str {
        let start = std::mem::replace(&mut self.shown, self.text.len());
        self.text.get(start..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_whole_and_broken_bytes_as_the_sign_for_them() {
        let tokenizer = Tokenizer::bytes();
        let pieces = |bytes: &[u8]| {
            let mut tokens = vec![i64::from(b'>')];
            let mut text = GrowingText::after(&tokens, &tokenizer).expect("bytes");
            let mut pieces = Vec::new();
            for byte in bytes {
                tokens.push(i64::from(*byte));
                pieces.push(text.grown(&tokens, &tokenizer).expect("bytes").to_owned());
            }
            pieces.push(text.rest().to_owned());
            pieces
        };
        assert_eq!(pieces("aé€".as_bytes()), ["a", "", "é", "", "", "€", ""]);
        assert_eq!(pieces(&[0xC3, b'x', 0xFF]), ["", "\u{FFFD}x", "", "\u{FFFD}"]);
        assert_eq!(pieces(&[0xE2]), ["", "\u{FFFD}"]);
    }

    #[test]
    fn the_likeliest_is_chosen_at_temperature_0_and_among_1() {
        let logits = Tensor::from_slice(&[0.1, 3.0, -2.0, 2.9]);
        let sampling = |temperature, top_k, top_p| Sampling { temperature, top_k, top_p };
        for sampling in [
            sampling(0.0, None, 1.0),
            sampling(0.0, Some(3), 1.0),
            sampling(5.0, Some(1), 1.0),
            sampling(1e-300, None, 1.0),
            sampling(5.0, None, 0.01),
        ] {
            assert_eq!(choose(&logits, &sampling).int64_value(&[0]), 1);
        }
        tch::manual_seed(1);
        // The two likeliest reach a probability of 0.5 together, and neither alone.
        for sampling in [sampling(10.0, Some(2), 1.0), sampling(10.0, None, 0.5)] {
            let drawn: Vec<i64> =
                (0..40).map(|_| choose(&logits, &sampling).int64_value(&[0])).collect();
            assert!(drawn.iter().all(|token| [1, 3].contains(token)), "{drawn:?}");
            assert!(drawn.contains(&3), "{drawn:?}");
        }
    }
}
