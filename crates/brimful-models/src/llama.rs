//! A Llama: the decoder-only transformer with RMSNorm, rotary positions, grouped queries and SwiGLU, under the names
//! of its published weights. Mistral and Qwen2 differ only in numbers and biases.
//!
//! "LLaMA: Open and Efficient Foundation Language Models", Touvron et al., 2023. Each block is one layer.

use std::sync::Arc;

use brimful::Layers;
use brimful::nn::{Norm, Projection, ProjectionConfig, bias_swiglu, rms_norm_with};
use tch::Tensor;
use tch::nn::{Module, ModuleT, Path};

use crate::KeyValueCache;
use crate::attention::{BlockCache, Heads};
use crate::rotary::{RotaryScaling, RotaryTables};
use crate::tokens::{Embedding, TokenTable, add_head, token_table};

/// Name of the layer with the token embedding.
const TOKEN_TABLE: &str = "model.embed_tokens";

/// Shape of a Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    /// Number of transformer blocks.
    pub layers: usize,
    /// Width of a token's hidden state.
    pub width: i64,
    /// Inner width of a block's network.
    pub inner: i64,
    /// Number of query heads in a block.
    pub heads: i64,
    /// Number of key and value heads: each is shared by the same number of query heads.
    pub key_value_heads: i64,
    /// Width of a head.
    pub head_width: i64,
    /// Longest sequence that the model takes.
    pub context: i64,
    /// Number of different tokens.
    pub vocabulary: i64,
    /// Epsilon of the RMSNorms.
    pub eps: f64,
    /// Base of the rotary positions.
    pub rotary_base: f64,
    /// Scaling of the rotary positions for longer contexts.
    pub rotary_scaling: RotaryScaling,
    /// Projections that have a bias.
    pub biases: LlamaBiases,
    /// True if the head shares the embedding's table; else it has its own.
    pub tied: bool,
    /// Dropout probability of the attention weights; 0 for none.
    pub dropout: f64,
    /// Standard deviation of the initial weights.
    pub spread: f64,
}

/// Projections of a Llama that have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LlamaBiases {
    /// Projections to queries, keys and values.
    pub queries_keys_values: bool,
    /// Projection that joins the heads.
    pub output: bool,
    /// Projections of the network.
    pub network: bool,
}

/// Returns a Llama, from token numbers (samples × sequence) to logits (samples × sequence × vocabulary).
///
/// Layers: `model.embed_tokens`, the blocks `model.layers.0` and on, `model.norm`, `lm_head`. A tied head shares the
/// variable `model.embed_tokens.weight`.
///
/// If the key and value heads do not divide the query heads, building the first block fails.
pub fn llama(config: &Llama) -> Layers {
    llama_keeping(config, None)
}

/// Returns a [`llama`] that keeps keys and values of earlier tokens: see [`KeyValueCache`].
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
        ProjectionConfig { spread: self.spread, bias, inputs_first: false }
    }
}

/// Attention and a gated network, each on normed inputs and with a residual connection.
#[derive(Debug)]
struct LlamaBlock {
    input_norm: Norm,
    attention: LlamaAttention,
    post_norm: Norm,
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

/// Causal self-attention with grouped queries.
#[derive(Debug)]
struct LlamaAttention {
    /// Projections to queries, keys and values.
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
            queries: self.rotary.apply(&queries, first),
            keys: self.rotary.apply(&keys, first),
            values,
        };
        let dropout = if train { self.dropout } else { 0.0 };
        self.join.forward(&heads.attend(self.cache.as_ref(), dropout))
    }
}

/// A two-layer network with gated inner activations: `down(silu(gate(x)) · up(x))`.
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
        // Computes `gate` and `up` in one product. A single fused pass then gates the product, and keeps nothing
        // else for the backward.
        let both = Projection::forward_joined([&self.gate, &self.up], x);
        let gated = bias_swiglu(&both, None).unwrap_or_else(|error| panic!("{error}"));
        self.down.forward(&gated)
    }
}
