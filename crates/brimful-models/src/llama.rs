//! A Llama: the decoder-only transformer with RMSNorm, rotary positions, grouped queries and SwiGLU, under the names
//! of its published weights. Mistral's and Qwen2's differ in numbers and biases alone.
//!
//! "LLaMA: Open and Efficient Foundation Language Models", Touvron et al., 2023. Each block is one layer.

use std::sync::Arc;

use brimful::Layers;
use brimful::nn::{Projection, ProjectionConfig, RmsNorm, WeightOrder, bias_swiglu, rms_norm_with};
use tch::Tensor;
use tch::nn::{Module, ModuleT, Path};

use crate::KeyValueCache;
use crate::attention::{BlockCache, Heads};
use crate::rotary::{RotaryScaling, RotaryTables};
use crate::tokens::{Embedding, TokenTable, add_head, token_table};

/// The layer with the table of tokens.
const TOKEN_TABLE: &str = "model.embed_tokens";

/// The shape of a Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    /// How many transformer blocks it has.
    pub layers: usize,
    /// How many numbers stand for a token.
    pub width: i64,
    /// How many numbers a block's network has between its two ends.
    pub inner: i64,
    /// How many heads of queries a block has.
    pub heads: i64,
    /// How many heads of keys and values: each is shared by as many heads of queries as the others.
    pub key_value_heads: i64,
    /// How many numbers a head has.
    pub head_width: i64,
    /// The longest sequence that it takes.
    pub context: i64,
    /// How many different tokens there are.
    pub vocabulary: i64,
    /// What is added to mean squares.
    pub eps: f64,
    /// The base of its rotary positions.
    pub rotary_base: f64,
    /// How those were stretched for longer contexts.
    pub rotary_scaling: RotaryScaling,
    /// Which projections have a bias.
    pub biases: LlamaBiases,
    /// Whether the head uses the table of the embedding, or has its own.
    pub tied: bool,
    /// The part of what is looked at that training drops; 0 for none.
    pub dropout: f64,
    /// How far weights spread at the start.
    pub spread: f64,
}

/// Which projections of a Llama have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LlamaBiases {
    /// Those of queries, keys and values.
    pub queries_keys_values: bool,
    /// That which joins the heads.
    pub output: bool,
    /// Those of the network.
    pub network: bool,
}

/// A Llama, from token numbers (samples × sequence) to logits (samples × sequence × vocabulary).
///
/// Layers: `model.embed_tokens`, the blocks `model.layers.0` and on, `model.norm`, `lm_head`. A tied head shares the
/// variable `model.embed_tokens.weight`.
///
/// Heads of queries that cannot be shared out evenly are refused when the first block is built.
pub fn llama(config: &Llama) -> Layers {
    llama_keeping(config, None)
}

/// A [`llama`] that keeps what it has seen, to go on from there: see [`KeyValueCache`].
pub fn llama_with_cache(config: &Llama, cache: &KeyValueCache) -> Layers {
    llama_keeping(config, Some(cache))
}

pub(crate) fn llama_keeping(config: &Llama, cache: Option<&KeyValueCache>) -> Layers {
    let Llama { layers, width, vocabulary, eps, tied, spread, .. } = *config;
    let rotary = Arc::new(RotaryTables::new(config));
    let shape = Arc::new(config.clone());
    let blocks = (0..layers).fold(Layers::new(), |blocks, number| {
        let shape = Arc::clone(&shape);
        let rotary = Arc::clone(&rotary);
        let cache = BlockCache::of(cache, number);
        let blocks = blocks
            .add(number.to_string(), move |p| LlamaBlock::new(p, &shape, &rotary, cache.clone()));
        if number == 0 { blocks } else { blocks.like_before() }
    });
    let table = TokenTable { rows: vocabulary, width, spread };
    let body = Layers::new()
        .add(TOKEN_TABLE, move |p| Embedding(token_table(p, table)))
        .add_layers("model.layers", blocks)
        .add("model.norm", move |p| rms_norm_with(p, width, eps));
    add_head(body, table, tied.then_some(TOKEN_TABLE))
}

impl Llama {
    fn check(&self) {
        let Self { heads, key_value_heads, .. } = *self;
        assert!(
            key_value_heads > 0 && heads > 0 && heads % key_value_heads == 0,
            "{heads} heads of queries cannot share {key_value_heads} heads of keys and values evenly: change \
             either"
        );
    }

    fn projection(&self, bias: bool) -> ProjectionConfig {
        ProjectionConfig { spread: self.spread, bias, order: WeightOrder::OutputsFirst }
    }
}

/// Attention and a gated network, each normed before and added to what came in.
#[derive(Debug)]
struct LlamaBlock {
    input_norm: RmsNorm,
    attention: LlamaAttention,
    post_norm: RmsNorm,
    network: GatedNetwork,
}

impl LlamaBlock {
    fn new(
        path: &Path,
        shape: &Llama,
        rotary: &Arc<RotaryTables>,
        cache: Option<BlockCache>,
    ) -> Self {
        shape.check();
        let norm = |name| rms_norm_with(path / name, shape.width, shape.eps);
        Self {
            input_norm: norm("input_layernorm"),
            attention: LlamaAttention::new(&(path / "self_attn"), shape, rotary, cache),
            post_norm: norm("post_attention_layernorm"),
            network: GatedNetwork::new(&(path / "mlp"), shape),
        }
    }
}

impl ModuleT for LlamaBlock {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let (x, normed) = self.input_norm.forward_beside(x);
        let attended = self.attention.forward_t(&normed, train);
        let (x, normed) = self.post_norm.forward_add(&attended, &x);
        x + self.network.forward(&normed)
    }
}

/// Each place looks at those before it, and at itself; heads of queries share keys and values.
#[derive(Debug)]
struct LlamaAttention {
    /// To queries, keys and values.
    split: [Projection; 3],
    join: Projection,
    head_width: i64,
    dropout: f64,
    rotary: Arc<RotaryTables>,
    cache: Option<BlockCache>,
}

impl LlamaAttention {
    fn new(
        path: &Path,
        shape: &Llama,
        rotary: &Arc<RotaryTables>,
        cache: Option<BlockCache>,
    ) -> Self {
        let Llama { width, head_width, biases, dropout, .. } = *shape;
        let [all, grouped] = [shape.heads, shape.key_value_heads].map(|heads| heads * head_width);
        let config = shape.projection(biases.queries_keys_values);
        let split = [("q_proj", all), ("k_proj", grouped), ("v_proj", grouped)];
        let join = shape.projection(biases.output);
        Self {
            split: split.map(|(name, out)| Projection::new(&(path / name), width, out, config)),
            join: Projection::new(&(path / "o_proj"), all, width, join),
            head_width,
            dropout,
            rotary: Arc::clone(rotary),
            cache,
        }
    }
}

impl ModuleT for LlamaAttention {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let (samples, sequence, _) = x.size3().expect("samples × sequence × width");
        let heads = Projection::forward_all(self.split.each_ref(), x);
        let [queries, keys, values] =
            heads.map(|all| all.view([samples, sequence, -1, self.head_width]));
        let first = BlockCache::first_place(self.cache.as_ref());
        let heads = Heads {
            queries: self.rotary.turn(&queries, first),
            keys: self.rotary.turn(&keys, first),
            values,
        };
        let dropout = if train { self.dropout } else { 0.0 };
        self.join.forward(&heads.attend(self.cache.as_ref(), dropout))
    }
}

/// A network of two layers whose inner numbers are gated: `down(silu(gate(x)) · up(x))`.
#[derive(Debug)]
struct GatedNetwork {
    gate: Projection,
    up: Projection,
    down: Projection,
}

impl GatedNetwork {
    fn new(path: &Path, shape: &Llama) -> Self {
        let Llama { width, inner, biases, .. } = *shape;
        let config = shape.projection(biases.network);
        Self {
            gate: Projection::new(&(path / "gate_proj"), width, inner, config),
            up: Projection::new(&(path / "up_proj"), width, inner, config),
            down: Projection::new(&(path / "down_proj"), inner, width, config),
        }
    }
}

impl Module for GatedNetwork {
    fn forward(&self, x: &Tensor) -> Tensor {
        // Side by side, because one pass then gates them, and keeps nothing else for the backward.
        let both = Projection::forward_joined([&self.gate, &self.up], x);
        let gated = bias_swiglu(&both, None).unwrap_or_else(|error| panic!("{error}"));
        self.down.forward(&gated)
    }
}
