//! A GPT: the decoder-only transformer of GPT-2, with its names and shapes, so that its weights
//! load.
//!
//! "Language Models are Unsupervised Multitask Learners", Radford et al., 2019. Each transformer
//! block is one layer. Linear weights are inputs × outputs, as GPT-2's published ones are.

use brimful::Layers;
use brimful::nn::{Gelu, LayerNorm, bias_gelu, layer_norm};
use tch::Tensor;
use tch::nn::{Init, Module, ModuleT, Path};

/// How far GPT-2's weights spread at the start.
const SPREAD: f64 = 0.02;
/// The name of a GPT's last layer.
pub const GPT_HEAD: &str = "lm_head";
/// The name of the layer with the table of tokens.
const TOKEN_TABLE: &str = "wte";
/// A GPU's fast kernels take a table whose rows are a multiple of this.
const FAST_ROWS: i64 = 64;

/// The shape of a GPT.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt {
    /// How many transformer blocks it has.
    pub layers: usize,
    /// How many numbers stand for a token.
    pub width: i64,
    /// How many attention heads a block has; the width is a multiple of it.
    pub heads: i64,
    /// The longest sequence that it takes.
    pub context: i64,
    /// How many different tokens there are.
    pub vocabulary: i64,
    /// The part of the activations that training drops; 0 for none.
    pub dropout: f64,
    /// Whether the head uses the table of the embedding, as GPT-2's does, or has its own.
    pub tied: bool,
}

impl Gpt {
    /// GPT-2 small: 124,439,808 parameters.
    pub fn gpt2_small() -> Self {
        Self::gpt2(12, 768, 12)
    }

    /// GPT-2 medium: 354,823,168 parameters.
    pub fn gpt2_medium() -> Self {
        Self::gpt2(24, 1024, 16)
    }

    /// GPT-2 large: 774,030,080 parameters.
    pub fn gpt2_large() -> Self {
        Self::gpt2(36, 1280, 20)
    }

    /// GPT-2 XL: 1,557,611,200 parameters.
    pub fn gpt2_xl() -> Self {
        Self::gpt2(48, 1600, 25)
    }

    fn gpt2(layers: usize, width: i64, heads: i64) -> Self {
        let (context, vocabulary) = (1024, 50_257);
        Self { layers, width, heads, context, vocabulary, dropout: 0.1, tied: true }
    }
}

/// A GPT, from token numbers (samples × sequence) to logits (samples × sequence × vocabulary).
///
/// Layers: `wte`, `wpe`, `drop`, the blocks `h.0` and on, `ln_f`, `lm_head`. A tied head shares
/// the variable `wte.weight`: there is one tensor where both are built in one variable store, and
/// [`Layers::shared`] names the pair for those who build them apart.
///
/// A width that is not a multiple of the heads is refused when the first block is built.
pub fn gpt(config: &Gpt) -> Layers {
    let Gpt { width, vocabulary, tied, .. } = *config;
    let body = gpt_body(config);
    match tied {
        true => body
            .add_sharing(GPT_HEAD, TOKEN_TABLE, move |_, p| GptHead(table(p, vocabulary, width))),
        false => body.add(GPT_HEAD, move |p| GptHead(table(p, vocabulary, width))),
    }
}

/// The weight of the head of a [`gpt`] that was built under this path, tied or not.
pub fn gpt_head_weight(root: &Path) -> Option<Tensor> {
    [GPT_HEAD, TOKEN_TABLE].iter().find_map(|layer| (root / *layer).get("weight"))
}

/// A [`gpt`] without its head, from token numbers to hidden states (samples × sequence × width): for a
/// loss that takes the head's weight itself, so that logits never exist whole. A tied head's is the variable
/// `wte.weight`:
///
/// ```
/// use brimful::nn::linear_cross_entropy;
/// use brimful::{MicroBatcher, Size};
/// use brimful_models::{Gpt, gpt_body};
/// use tch::nn::{ModuleT, VarStore};
/// use tch::{Device, Kind, Tensor};
///
/// let shape = Gpt { layers: 1, width: 16, heads: 2, context: 8, ..Gpt::gpt2_small() };
/// let store = VarStore::new(Device::Cpu);
/// let body = gpt_body(&shape).build(&store.root())?;
/// let table = store.variables().remove("wte.weight").expect("the embedding's table");
/// let tokens = Tensor::randint(50_257, [4, 9], (Kind::Int64, Device::Cpu));
/// MicroBatcher::new(&store, Size::Fixed(2)).backward(&tokens, |tokens| {
///     let hidden = body.forward_t(&tokens.narrow(1, 0, 8), true);
///     linear_cross_entropy(&hidden, &table, None, &tokens.narrow(1, 1, 8), Default::default())
/// })?;
/// # Ok::<(), brimful::Error>(())
/// ```
pub fn gpt_body(config: &Gpt) -> Layers {
    let Gpt { layers, width, heads, context, vocabulary, dropout, .. } = *config;
    let shape = TransformerShape { layers, width, heads, dropout };
    let blocks = (0..layers).fold(Layers::new(), |blocks, number| {
        blocks.add(number.to_string(), move |p| TransformerBlock::new(p, shape))
    });
    Layers::new()
        .add(TOKEN_TABLE, move |p| Embedding(table(p, vocabulary, width)))
        .add("wpe", move |p| Positions(table(p, context, width)))
        .add_fn_t("drop", move |x, train| x.dropout(dropout, train))
        .add_layers("h", blocks)
        .add("ln_f", move |p| layer_norm(p, width))
}

/// Looks each token up in a table.
#[derive(Debug)]
struct Embedding(Tensor);

impl Module for Embedding {
    fn forward(&self, tokens: &Tensor) -> Tensor {
        Tensor::embedding(&self.0, tokens, -1, false, false)
    }
}

/// Adds to each token what stands for its place.
#[derive(Debug)]
struct Positions(Tensor);

impl Module for Positions {
    fn forward(&self, x: &Tensor) -> Tensor {
        let (sequence, context) = (x.size()[1], self.0.size()[0]);
        assert!(
            sequence <= context,
            "a sequence of {sequence} tokens is longer than the context of {context}: shorten it, \
             or build the model with a longer context"
        );
        x + self.0.narrow(0, 0, sequence)
    }
}

/// Compares each place with every token of a table.
#[derive(Debug)]
struct GptHead(Tensor);

impl Module for GptHead {
    fn forward(&self, x: &Tensor) -> Tensor {
        let rows = self.0.size()[0];
        let missing = (-rows).rem_euclid(FAST_ROWS);
        if missing == 0 || !self.0.device().is_cuda() {
            return x.linear(&self.0, None::<Tensor>);
        }
        // GPT-2's 50,257 rows are odd, which leaves only kernels that are three times slower.
        let table = self.0.constant_pad_nd([0, 0, 0, missing]);
        x.linear(&table, None::<Tensor>).narrow(-1, 0, rows)
    }
}

#[derive(Debug, Clone, Copy)]
struct TransformerShape {
    layers: usize,
    width: i64,
    heads: i64,
    dropout: f64,
}

/// Attention and a two-layer network, each normed before and added to what came in.
#[derive(Debug)]
struct TransformerBlock {
    ln_1: LayerNorm,
    attention: Attention,
    ln_2: LayerNorm,
    expand: Projection,
    contract: Projection,
    dropout: f64,
}

impl TransformerBlock {
    fn new(path: &Path, shape: TransformerShape) -> Self {
        let width = shape.checked_width();
        let mlp = path / "mlp";
        Self {
            ln_1: layer_norm(path / "ln_1", width),
            attention: Attention::new(&(path / "attn"), shape),
            ln_2: layer_norm(path / "ln_2", width),
            expand: Projection::new(&(&mlp / "c_fc"), width, 4 * width, SPREAD),
            contract: Projection::new(
                &(&mlp / "c_proj"),
                4 * width,
                width,
                shape.residual_spread(),
            ),
            dropout: shape.dropout,
        }
    }
}

impl ModuleT for TransformerBlock {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let attended = self.attention.forward_t(&self.ln_1.forward(x), train);
        let (x, normed) = self.ln_2.forward_add(&attended.dropout(self.dropout, train), x);
        let mixed = self.contract.forward(&self.expand.forward_gelu(&normed));
        x + mixed.dropout(self.dropout, train)
    }
}

impl TransformerShape {
    fn checked_width(&self) -> i64 {
        let Self { width, heads, .. } = *self;
        assert!(
            heads > 0 && width % heads == 0,
            "a width of {width} cannot be cut into {heads} equal heads: change either"
        );
        width
    }

    /// Two sums a block add up along the way; smaller weights keep their total as it was.
    fn residual_spread(&self) -> f64 {
        SPREAD / (2.0 * self.layers as f64).sqrt()
    }
}

/// Each place looks at those before it, and at itself.
#[derive(Debug)]
struct Attention {
    /// Queries, keys and values, in one multiplication.
    split: Projection,
    join: Projection,
    heads: i64,
    dropout: f64,
}

impl Attention {
    fn new(path: &Path, shape: TransformerShape) -> Self {
        let width = shape.width;
        Self {
            split: Projection::new(&(path / "c_attn"), width, 3 * width, SPREAD),
            join: Projection::new(&(path / "c_proj"), width, width, shape.residual_spread()),
            heads: shape.heads,
            dropout: shape.dropout,
        }
    }
}

impl ModuleT for Attention {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let (samples, sequence, width) = x.size3().expect("samples × sequence × width");
        let cut = [samples, sequence, self.heads, width / self.heads];
        let parts = self.split.forward(x).split(width, 2);
        let [q, k, v] = [0, 1, 2].map(|part: usize| parts[part].view(cut).transpose(1, 2));
        let dropout = if train { self.dropout } else { 0.0 };
        let mask = None::<Tensor>;
        let out =
            Tensor::scaled_dot_product_attention(&q, &k, &v, mask, dropout, true, None, false);
        self.join.forward(&out.transpose(1, 2).reshape([samples, sequence, width]))
    }
}

/// A linear layer whose weights are inputs × outputs.
#[derive(Debug)]
struct Projection {
    weight: Tensor,
    bias: Tensor,
}

impl Projection {
    fn new(path: &Path, inputs: i64, outputs: i64, spread: f64) -> Self {
        let weight = path.randn("weight", &[inputs, outputs], 0.0, spread);
        Self { weight, bias: path.zeros("bias", &[outputs]) }
    }
}

impl Projection {
    /// The rows of `x`, and the shape of what comes out.
    fn rows(&self, x: &Tensor) -> (Tensor, [i64; 3]) {
        let (samples, sequence, inputs) = x.size3().expect("samples × sequence × width");
        (x.reshape([samples * sequence, inputs]), [samples, sequence, self.bias.size()[0]])
    }

    /// With a GELU after it, whose pass adds the bias and sums up its gradient.
    fn forward_gelu(&self, x: &Tensor) -> Tensor {
        let (rows, shape) = self.rows(x);
        let out = bias_gelu(&rows.mm(&self.weight), Some(&self.bias), Gelu::Tanh);
        out.unwrap_or_else(|error| panic!("{error}")).view(shape)
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Tensor {
        let (rows, shape) = self.rows(x);
        // One kernel for the product and the bias.
        self.bias.addmm(&rows, &self.weight).view(shape)
    }
}

/// The table of this path, made if it is not there.
fn table(path: &Path, rows: i64, width: i64) -> Tensor {
    let init = Init::Randn { mean: 0.0, stdev: SPREAD };
    path.get("weight").unwrap_or_else(|| path.var("weight", &[rows, width], init))
}
