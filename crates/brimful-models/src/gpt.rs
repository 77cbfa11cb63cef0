//! A GPT: the decoder-only transformer of GPT-2, with its names and shapes, so that its weights
//! load.
//!
//! "Language Models are Unsupervised Multitask Learners", Radford et al., 2019. Each transformer
//! block is one layer. Linear weights are inputs × outputs, as GPT-2's published ones are.

use brimful::Layers;
use brimful::nn::{Norm, Projection, ProjectionConfig, bias_gelu_tanh, layer_norm};
use tch::Tensor;
use tch::nn::{Module, ModuleT, Path};

use crate::KeyValueCache;
use crate::attention::{BlockCache, Heads};
use crate::tokens::{self, TokenTable, add_head, token_table};

/// Standard deviation of GPT-2's initial weights.
pub(crate) const SPREAD: f64 = 0.02;
/// Name of the layer with the token embedding.
const TOKEN_TABLE: &str = "wte";

/// Shape of a GPT.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt {
    /// Number of transformer blocks.
    pub layers: usize,
    /// Width of a token's hidden state.
    pub width: i64,
    /// Number of attention heads in a block; it divides the width.
    pub heads: i64,
    /// Longest sequence that the model takes.
    pub context: i64,
    /// Number of different tokens.
    pub vocabulary: i64,
    /// Dropout probability; 0 for none.
    pub dropout: f64,
    /// True if the head shares the embedding's table, as GPT-2's does; else it has its own.
    pub tied: bool,
}

impl Gpt {
    /// Returns the shape of GPT-2 small: 124,439,808 parameters.
    pub fn gpt2_small() -> Self {
        Self::gpt2(12, 768, 12)
    }

    /// Returns the shape of GPT-2 medium: 354,823,168 parameters.
    pub fn gpt2_medium() -> Self {
        Self::gpt2(24, 1024, 16)
    }

    /// Returns the shape of GPT-2 large: 774,030,080 parameters.
    pub fn gpt2_large() -> Self {
        Self::gpt2(36, 1280, 20)
    }

    /// Returns the shape of GPT-2 XL: 1,557,611,200 parameters.
    pub fn gpt2_xl() -> Self {
        Self::gpt2(48, 1600, 25)
    }

    fn gpt2(layers: usize, width: i64, heads: i64) -> Self {
        let (context, vocabulary) = (1024, 50_257);
        Self { layers, width, heads, context, vocabulary, dropout: 0.1, tied: true }
    }

    fn checked_width(&self) -> i64 {
        let Self { width, heads, .. } = *self;
        assert!(
            heads > 0 && width % heads == 0,
            "a width of {width} cannot be cut into {heads} equal heads: change either"
        );
        width
    }

    /// Returns the standard deviation for the projections into the residual stream. Each block adds two of them;
    /// smaller weights keep the variance of the sum independent of the depth.
    fn residual_spread(&self) -> f64 {
        SPREAD / (2.0 * self.layers as f64).sqrt()
    }
}

/// Returns a GPT, from token numbers (samples × sequence) to logits (samples × sequence × vocabulary).
///
/// Layers: `wte`, `wpe`, `drop`, the blocks `h.0` and on, `ln_f`, `lm_head`. A tied head shares the variable
/// `wte.weight`: built in one variable store, both use one tensor; for parts built separately, [`Layers::shared`]
/// names the pair.
///
/// If the heads do not divide the width, building the first block fails.
pub fn gpt(config: &Gpt) -> Layers {
    with_head(config, gpt_body(config), TOKEN_TABLE)
}

/// Returns a [`gpt`] that keeps keys and values of earlier tokens: see [`KeyValueCache`].
pub fn gpt_with_cache(config: &Gpt, cache: &KeyValueCache) -> Layers {
    with_head(config, body(config, Some(cache)), TOKEN_TABLE)
}

/// Returns a [`gpt`] with its body's layers under this name.
pub(crate) fn gpt_under(name: &str, config: &Gpt, cache: Option<&KeyValueCache>) -> Layers {
    let inner = Layers::new().add_layers(name, body(config, cache));
    with_head(config, inner, &format!("{name}.{TOKEN_TABLE}"))
}

fn with_head(config: &Gpt, body: Layers, owner: &str) -> Layers {
    let table = TokenTable { rows: config.vocabulary, width: config.width, spread: SPREAD };
    add_head(body, table, config.tied.then_some(owner))
}

/// Returns a [`gpt`] without its head, from token numbers to hidden states (samples × sequence × width). Use it with a
/// loss that takes the head's weight itself, so that the logits of all tokens never exist at once. The weight of a tied
/// head is the variable `wte.weight`:
///
/// ```
/// use brimful::nn::linear_cross_entropy;
/// use brimful::{MicroBatcher, MicroBatches};
/// use brimful_models::{Gpt, gpt_body};
/// use tch::nn::{ModuleT, VarStore};
/// use tch::{Device, Kind, Tensor};
///
/// let shape = Gpt { layers: 1, width: 16, heads: 2, context: 8, ..Gpt::gpt2_small() };
/// let store = VarStore::new(Device::Cpu);
/// let body = gpt_body(&shape).build(&store.root())?;
/// let table = store.variables().remove("wte.weight").expect("the embedding's table");
/// let tokens = Tensor::randint(50_257, [4, 9], (Kind::Int64, Device::Cpu));
/// MicroBatcher::new(&store, MicroBatches::Samples(2)).backward(&tokens, |tokens| {
///     let hidden = body.forward_t(&tokens.narrow(1, 0, 8), true);
///     linear_cross_entropy(&hidden, &table, None, &tokens.narrow(1, 1, 8), Default::default())
/// })?;
/// # Ok::<(), brimful::Error>(())
/// ```
pub fn gpt_body(config: &Gpt) -> Layers {
    body(config, None)
}

fn body(config: &Gpt, cache: Option<&KeyValueCache>) -> Layers {
    let Gpt { layers, width, context, vocabulary, dropout, .. } = *config;
    let blocks = (0..layers).fold(Layers::new(), |blocks, number| {
        let (shape, cache) = (config.clone(), BlockCache::of(cache, number));
        let blocks = blocks
            .add(number.to_string(), move |p| TransformerBlock::new(p, &shape, cache.clone()));
        if number == 0 { blocks } else { blocks.like_before() }
    });
    let tokens = TokenTable { rows: vocabulary, width, spread: SPREAD };
    let places = TokenTable { rows: context, width, spread: SPREAD };
    let cache = cache.cloned();
    Layers::new()
        .add(TOKEN_TABLE, move |p| tokens::Embedding(token_table(p, tokens)))
        .add("wpe", move |p| Positions { table: token_table(p, places), cache: cache.clone() })
        .add_fn_t("drop", move |x, train| x.dropout(dropout, train))
        .add_layers("h", blocks)
        .add("ln_f", move |p| layer_norm(p, width))
}

/// Layer that adds the embedding of its position to each token.
#[derive(Debug)]
struct Positions {
    table: Tensor,
    cache: Option<KeyValueCache>,
}

impl Module for Positions {
    fn forward(&self, x: &Tensor) -> Tensor {
        let first = self.cache.as_ref().map_or(0, KeyValueCache::seen);
        let (sequence, context) = (x.size()[1], self.table.size()[0]);
        let last = first + sequence;
        assert!(
            last <= context,
            "a sequence of {last} tokens is longer than the context of {context}: shorten it, \
             or build the model with a longer context"
        );
        x + self.table.narrow(0, first, sequence)
    }
}

/// Attention and a two-layer network, each on normed inputs and with a residual connection.
#[derive(Debug)]
struct TransformerBlock {
    ln_1: Norm,
    attention: Attention,
    ln_2: Norm,
    expand: Projection,
    contract: Projection,
    dropout: f64,
}

impl TransformerBlock {
    fn new(path: &Path, shape: &Gpt, cache: Option<BlockCache>) -> Self {
        let width = shape.checked_width();
        let mlp = path / "mlp";
        let residual = projection(shape.residual_spread());
        Self {
            ln_1: layer_norm(path / "ln_1", width),
            attention: Attention::new(&(path / "attn"), shape, cache),
            ln_2: layer_norm(path / "ln_2", width),
            expand: Projection::new(&(&mlp / "c_fc"), width, 4 * width, projection(SPREAD)),
            contract: Projection::new(&(&mlp / "c_proj"), 4 * width, width, residual),
            dropout: shape.dropout,
        }
    }

    /// Applies the network's first layer with a GELU, fused with the bias and its gradient.
    fn expand(&self, x: &Tensor) -> Tensor {
        let out = bias_gelu_tanh(&self.expand.forward_unbiased(x), self.expand.bias());
        out.unwrap_or_else(|error| panic!("{error}"))
    }
}

impl ModuleT for TransformerBlock {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let (x, normed) = self.ln_1.forward_beside(x);
        let attended = self.attention.forward_t(&normed, train);
        let (x, normed) = self.ln_2.forward_add(&attended.dropout(self.dropout, train), &x);
        let mixed = self.contract.forward(&self.expand(&normed));
        x + mixed.dropout(self.dropout, train)
    }
}

/// Causal self-attention.
#[derive(Debug)]
struct Attention {
    /// Projection to queries, keys and values in one multiplication.
    split: Projection,
    join: Projection,
    heads: i64,
    dropout: f64,
    cache: Option<BlockCache>,
}

impl Attention {
    fn new(path: &Path, shape: &Gpt, cache: Option<BlockCache>) -> Self {
        let Gpt { width, heads, dropout, .. } = *shape;
        let residual = projection(shape.residual_spread());
        Self {
            split: Projection::new(&(path / "c_attn"), width, 3 * width, projection(SPREAD)),
            join: Projection::new(&(path / "c_proj"), width, width, residual),
            heads,
            dropout,
            cache,
        }
    }
}

impl ModuleT for Attention {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let (samples, sequence, width) = x.size3().expect("samples × sequence × width");
        let cut = [samples, sequence, self.heads, width / self.heads];
        let parts = self.split.forward(x).split(width, 2);
        let part = |at: usize| parts[at].view(cut);
        let heads = Heads { queries: part(0), keys: part(1), values: part(2) };
        let dropout = if train { self.dropout } else { 0.0 };
        self.join.forward(&heads.attend(self.cache.as_ref(), dropout))
    }
}

/// Returns the configuration of GPT-2's published weights: inputs × outputs, with a bias.
fn projection(spread: f64) -> ProjectionConfig {
    ProjectionConfig { spread, bias: true, inputs_first: true }
}
