//! Both ends of a language model: the token embedding and the head.

use brimful::Layers;
use brimful::nn::{embedding, spread_weight};
use tch::Tensor;
use tch::nn::{Module, Path};

/// Name of a language model's last layer, its head.
pub const LANGUAGE_HEAD: &str = "lm_head";
/// Names of the embeddings that a tied head may share, for all models here.
const TABLES: [&str; 3] = ["wte", "transformer.wte", "model.embed_tokens"];
/// Number that must divide the rows of a head for a GPU's fast kernels.
const FAST_ROWS: i64 = 64;

/// Returns the weight of the head of a language model built under this path, tied or not.
pub fn language_head_weight(root: &Path) -> Option<Tensor> {
    let weight =
        |layer: &str| layer.split('.').fold(root.clone(), |path, step| path / step).get("weight");
    [LANGUAGE_HEAD].into_iter().chain(TABLES).find_map(weight)
}

/// Size of a token embedding, and the standard deviation of its initial values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenTable {
    pub(crate) rows: i64,
    pub(crate) width: i64,
    pub(crate) spread: f64,
}

/// Returns the table at this path, and creates it if it does not exist.
pub(crate) fn token_table(path: &Path, table: TokenTable) -> Tensor {
    let TokenTable { rows, width, spread } = table;
    path.get("weight").unwrap_or_else(|| spread_weight(path, &[rows, width], spread))
}

/// Appends the head, which may share the embedding of the layer `tied`.
pub(crate) fn add_head(body: Layers, table: TokenTable, tied: Option<&str>) -> Layers {
    match tied {
        Some(owner) => {
            body.add_sharing(LANGUAGE_HEAD, owner, move |_, p| LanguageHead(token_table(p, table)))
        }
        None => body.add(LANGUAGE_HEAD, move |p| LanguageHead(token_table(p, table))),
    }
}

/// Token embedding.
#[derive(Debug)]
pub(crate) struct Embedding(pub(crate) Tensor);

impl Module for Embedding {
    fn forward(&self, tokens: &Tensor) -> Tensor {
        embedding(&self.0, tokens).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Head: computes the logits of every token.
#[derive(Debug)]
struct LanguageHead(Tensor);

impl Module for LanguageHead {
    fn forward(&self, x: &Tensor) -> Tensor {
        let rows = self.0.size()[0];
        let missing = (-rows).rem_euclid(FAST_ROWS);
        if missing == 0 || !self.0.device().is_cuda() {
            return x.linear(&self.0, None::<Tensor>);
        }
        // GPT-2's 50,257 rows are odd, which would leave only kernels that are three times slower.
        let table = self.0.constant_pad_nd([0, 0, 0, missing]);
        x.linear(&table, None::<Tensor>).narrow(-1, 0, rows)
    }
}
