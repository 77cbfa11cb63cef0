//! A language model that continues a text: its weights, their device, and its key-value cache.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use brimful::layers::Model;
use brimful::pipeline::Offload;
use brimful::schedule::Schedule;
use brimful::{Layers, Pipeline};
use brimful_models::{KeyValueCache, gpt_with_cache};
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::GenerateOptions;
use crate::exit::{ensure_unsaid, ensure_use, wrong_use};
use crate::generation_config::{GenerationConfig, Sampling};
use crate::model::FineTune;
use crate::named::Named;
use crate::progress;
use crate::saved_weights::{SavedWeights, Weights};
use crate::setting::{self, ModelSource, NumberType};
use crate::tokenizer::Tokenizer;

/// A language model that continues a text.
#[derive(Debug)]
pub(super) struct Writer {
    runner: TextRunner,
    cache: KeyValueCache,
    device: Device,
    pub(super) tokenizer: Arc<Tokenizer>,
    /// Tokens of the prompt.
    pub(super) prompt: Vec<i64>,
    /// Tokens that end the text.
    pub(super) ends: Vec<i64>,
    /// Sampling parameters of the model's folder.
    pub(super) sampling: Sampling,
    /// Number of tokens that the tokenizer knows. A model may have more tokens, which stand for no text.
    known: i64,
}

/// Description of a language model, before it is built.
#[derive(Debug)]
struct TextModel {
    tokenizer: Arc<Tokenizer>,
    /// Number of tokens that the model sees at once.
    context: i64,
    /// Tokens that end the text.
    ends: Vec<i64>,
    /// Settings of the model's folder.
    told: GenerationConfig,
}

/// A built model, by the place of its weights.
#[derive(Debug)]
enum TextRunner {
    /// The whole model on a device.
    Whole { model: Model, store: VarStore },
    /// The model offloaded to the host. Its layers are copied to the device in turn.
    Streamed(Box<Pipeline>),
}

impl Writer {
    pub(super) fn open(options: &GenerateOptions) -> Result<Self> {
        let GenerateOptions { model, weights, adapter, .. } = options;
        let weights = Weights::open(model.as_ref(), weights.as_deref(), adapter.as_deref())?;
        let TextModel { tokenizer, context, ends, told } = match &weights {
            Weights::Folder(folder) => TextModel::of_folder(folder)?,
            Weights::File(file, _) => TextModel::of_file(file, options)?,
        };
        let prompt = tokenizer.encode(&options.prompt)?;
        let known = tokenizer.vocabulary();
        // The cache has room for the prompt and the text to write, but at most for the model's context.
        let cache = KeyValueCache::new(context.min((prompt.len() + options.tokens) as i64));
        let layers = match &weights {
            Weights::Folder(folder) => folder.layers_with_cache(&cache),
            Weights::File(_, name) => {
                let shape = name.text_shape(context, known, 0.0);
                gpt_with_cache(&shape.map_err(|error| wrong_use(error.to_string()))?, &cache)
            }
        };
        let (runner, device) = TextRunner::build(layers, weights.stored_kind(), options)?;
        weights.put_into(runner.variables()?)?;
        if let (Some(ModelSource::Folder(folder)), false) = (model, told.left_out.is_empty()) {
            let (folder, left_out) = (folder.display(), told.left_out.join(", "));
            progress::say(&format!(
                "brimful: {folder}: generation_config.json's {left_out} is not applied"
            ));
        }
        let sampling = told.sampling.unwrap_or_default();
        Ok(Self { runner, cache, device, tokenizer, prompt, ends, sampling, known })
    }

    /// Returns the number of tokens that the model sees at once, in prompt and text.
    pub(super) fn context(&self) -> usize {
        self.cache.capacity() as usize
    }

    /// Returns the logits of the token that follows these tokens.
    pub(super) fn next(&mut self, tokens: &[i64]) -> Result<Tensor> {
        let capacity = self.context();
        let unseen = match tokens.len() > capacity {
            // The context drops its first token, so every position changes and the cache must be filled anew.
            true => {
                self.cache.clear();
                &tokens[tokens.len() - capacity..]
            }
            false => &tokens[usize::try_from(self.cache.seen())?..],
        };
        let input = Tensor::from_slice(unseen).unsqueeze(0).to_device(self.device);
        let logits = self.runner.run(&input)?.select(1, -1).squeeze();
        let logits = logits.narrow(0, 0, self.known.min(logits.size()[0]));
        self.cache.advance(unseen.len() as i64);
        let logits = logits.to_kind(Kind::Double).to_device(Device::Cpu);
        setting::check_answers(&logits)?;
        Ok(logits)
    }
}

impl TextModel {
    fn of_folder(folder: &FineTune) -> Result<Self> {
        let mut told = folder.generation_config()?;
        let tokenizer = Arc::clone(folder.tokenizer());
        let mut ends = told.ends.take().unwrap_or_else(|| folder.end_tokens());
        ends.extend(tokenizer.answer_ends());
        Ok(Self { tokenizer, context: folder.context(), ends, told })
    }

    fn of_file(weights: &SavedWeights, options: &GenerateOptions) -> Result<Self> {
        let flags = [("from-host", options.from_host)];
        ensure_unsaid(&flags, "a model of a folder: give --model FOLDER")?;
        let path = options.weights.as_deref().unwrap_or(Path::new(""));
        let shown = path.display();
        let no_gpt = || wrong_use(format!("{shown} has no weights of a gpt, which generate needs"));
        let vocabulary = weights.rows("wte.weight").ok_or_else(no_gpt)?;
        let context = weights.rows("wpe.weight").ok_or_else(no_gpt)?;
        let tokenizer = Arc::new(Tokenizer::bytes());
        let bytes = tokenizer.vocabulary();
        ensure_use!(
            vocabulary == bytes,
            "{shown} has a vocabulary of {vocabulary} tokens: generate writes bytes, a vocabulary of {bytes}"
        );
        Ok(Self { tokenizer, context, ends: Vec::new(), told: GenerationConfig::default() })
    }
}

impl TextRunner {
    /// Builds the model on the requested device. With `--from-host`, builds the model offloaded to the host.
    /// `stored` is the dtype of the weights in their file.
    fn build(layers: Layers, stored: Kind, options: &GenerateOptions) -> Result<(Self, Device)> {
        let device = setting::device(options.device.as_deref())?;
        let dtype = options.dtype.unwrap_or_else(|| NumberType::holding(stored));
        dtype.prepare(device)?;
        let kind = dtype.kind();
        if !options.from_host {
            let store = VarStore::new(device);
            let model = layers.kind(kind).build(&store.root());
            let model = model.context("the model cannot be built")?;
            return Ok((Self::Whole { model, store }, device));
        }
        let stages_per_device = layers.len();
        let pipeline = Pipeline::builder(layers)
            .devices([device])
            .balance(vec![1; stages_per_device])
            .schedule(Schedule::BreadthFirst { stages_per_device })
            .offload(Offload::Host)
            .kind(kind)
            .build()
            .context("the model cannot be built")?;
        Ok((Self::Streamed(Box::new(pipeline)), device))
    }

    fn variables(&self) -> Result<Named> {
        Ok(match self {
            Self::Whole { store, .. } => store.variables().into_iter().collect(),
            Self::Streamed(pipeline) => pipeline.variables()?,
        })
    }

    fn run(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let _without = tch::no_grad_guard();
        match self {
            Self::Whole { model, .. } => Ok(model.forward_t(tokens, false)),
            // Copies back only the last position, because the logits of all positions would take much memory.
            Self::Streamed(pipeline) => {
                Ok(pipeline.map(tokens, |out: Tensor| out.narrow(1, -1, 1))?)
            }
        }
    }
}
