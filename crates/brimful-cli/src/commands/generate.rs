//! `brimful generate`: text that a trained GPT writes, byte by byte.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use brimful::layers::Model;
use clap::Args;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::data::Sample;
use crate::exit::{Exit, wrong_use};
use crate::output;
use crate::saved_weights::SavedWeights;
use crate::setting::{self, MODELS, ModelName, words};

/// Different tokens of a text: bytes.
const BYTES: i64 = 256;

/// Options of `brimful generate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful train --model gpt --data book.txt --save gpt.safetensors
  brimful generate --weights gpt.safetensors --prompt 'Once upon a time'
  brimful generate --weights gpt.safetensors --prompt 'Once' --temperature 0.8 --top-k 20 --seed 7
  brimful generate --weights gpt.safetensors --prompt 'Once' --temperature 0   always the likeliest")]
pub struct GenerateOptions {
    /// A file of brimful train --save, or a safetensors or .ot file with the model's names
    #[arg(long, value_name = "FILE")]
    weights: PathBuf,
    #[arg(long, value_name = "NAME", help = format!("{MODELS} [default: as the file tells]"))]
    model: Option<ModelName>,
    /// What the text begins with
    #[arg(long, value_name = "TEXT", default_value = "\n", hide_default_value = true)]
    prompt: String,
    /// Tokens to write after it, each a byte
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = words::count)]
    tokens: usize,
    /// How freely it chooses: 0 takes the likeliest token, 1 draws as the model says
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Draw among the K likeliest tokens alone
    #[arg(long, value_name = "K", value_parser = words::count)]
    top_k: Option<usize>,
    #[arg(long, value_name = "N", default_value_t = 0, help = words::SEED)]
    seed: u64,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
}

/// Writes the prompt and what follows it, as it is made.
pub(crate) fn run(options: &GenerateOptions) -> Result<Exit> {
    let temperature = options.temperature;
    ensure!(
        temperature.is_finite() && temperature >= 0.0,
        wrong_use(format!("--temperature {temperature}: give it a number from 0 on"))
    );
    ensure!(!options.prompt.is_empty(), wrong_use("--prompt is empty: give it a character"));
    let writer = Writer::new(options)?;
    tch::manual_seed(i64::from_ne_bytes(options.seed.to_ne_bytes()));
    let mut tokens: Vec<i64> = options.prompt.bytes().map(i64::from).collect();
    let mut text = Utf8::default();
    output::piece(&options.prompt)?;
    for _ in 0..options.tokens {
        let token = writer.next(&tokens, options)?;
        tokens.push(token);
        output::piece(&text.push(u8::try_from(token)?))?;
    }
    output::line(&text.rest())?;
    Ok(Exit::Done)
}

/// A GPT that goes on with a text.
struct Writer {
    model: Model,
    device: Device,
    /// The most tokens that it looks back on.
    context: i64,
    /// Keeps the model's parameters.
    _store: VarStore,
}

impl Writer {
    fn new(options: &GenerateOptions) -> Result<Self> {
        let weights = SavedWeights::read(&options.weights)?;
        let name = weights.model(options.model)?;
        let path = options.weights.display();
        let no_gpt = || wrong_use(format!("{path} has no weights of a gpt: generate needs some"));
        let vocabulary = weights.rows("wte.weight").ok_or_else(no_gpt)?;
        let context = weights.rows("wpe.weight").ok_or_else(no_gpt)?;
        ensure!(
            vocabulary == BYTES,
            wrong_use(format!(
                "{path} knows {vocabulary} tokens: generate writes bytes, for which a gpt has {BYTES}"
            ))
        );
        let layers = name.layers(&Sample::Sequence { length: context, vocabulary }, 0.0);
        let layers = layers.map_err(|error| wrong_use(error.to_string()))?;
        let device = setting::device(options.device.as_deref())?;
        let store = VarStore::new(device);
        let model = layers.build(&store.root())?;
        weights.put_into(&store, name)?;
        Ok(Self { model, device, context, _store: store })
    }

    /// The token after these.
    fn next(&self, tokens: &[i64], options: &GenerateOptions) -> Result<i64> {
        let _without = tch::no_grad_guard();
        let seen = &tokens[tokens.len().saturating_sub(usize::try_from(self.context)?)..];
        let input = Tensor::from_slice(seen).unsqueeze(0).to_device(self.device);
        let logits = self.model.forward_t(&input, false).select(1, -1).squeeze();
        let logits = logits.to_kind(Kind::Double).to_device(Device::Cpu);
        ensure!(
            bool::try_from(logits.isfinite().all())?,
            "the model answers with numbers that are not finite: was its training?"
        );
        Ok(choose(&logits, options.temperature, options.top_k).int64_value(&[0]))
    }
}

/// A token by its logit: the likeliest, or one that is drawn among all or the likeliest few.
fn choose(logits: &Tensor, temperature: f64, top_k: Option<usize>) -> Tensor {
    if temperature == 0.0 {
        return logits.argmax(-1, true);
    }
    let count = top_k.map_or(logits.numel(), |k| k.min(logits.numel()));
    let (values, tokens) = logits.topk(count as i64, -1, true, true);
    // From the largest on, so that no temperature is too small for an exponent.
    let chances = ((&values - values.max()) / temperature).softmax(-1, Kind::Double);
    tokens.index_select(0, &chances.multinomial(1, false))
}

/// Bytes that come one by one, as text: what is no UTF-8 becomes the sign for that.
#[derive(Debug, Default)]
struct Utf8 {
    pending: Vec<u8>,
}

impl Utf8 {
    /// The characters that this byte completes.
    fn push(&mut self, byte: u8) -> String {
        self.pending.push(byte);
        match std::str::from_utf8(&self.pending) {
            // The beginning of a character.
            Err(error) if error.error_len().is_none() => String::new(),
            _ => self.rest(),
        }
    }

    /// What is left, broken off as it is.
    fn rest(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_whole_and_broken_bytes_as_the_sign_for_them() {
        let mut text = Utf8::default();
        let pieces: Vec<String> = "aé€".bytes().map(|byte| text.push(byte)).collect();
        assert_eq!(pieces, ["a", "", "é", "", "", "€"]);
        assert_eq!(
            [text.push(0xC3), text.push(b'x'), text.push(0xFF)],
            ["", "\u{FFFD}x", "\u{FFFD}"]
        );
        assert_eq!((text.push(0xE2), text.rest()), (String::new(), "\u{FFFD}".to_owned()));
    }

    #[test]
    fn the_likeliest_is_chosen_at_temperature_0_and_among_1() {
        let logits = Tensor::from_slice(&[0.1, 3.0, -2.0, 2.9]);
        for (temperature, top_k) in [(0.0, None), (0.0, Some(3)), (5.0, Some(1)), (1e-300, None)] {
            assert_eq!(choose(&logits, temperature, top_k).int64_value(&[0]), 1);
        }
        tch::manual_seed(1);
        let drawn: Vec<i64> =
            (0..40).map(|_| choose(&logits, 10.0, Some(2)).int64_value(&[0])).collect();
        assert!(drawn.iter().all(|token| [1, 3].contains(token)), "{drawn:?}");
        assert!(drawn.contains(&3), "{drawn:?}");
    }
}
