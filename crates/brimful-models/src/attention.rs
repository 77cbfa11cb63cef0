//! Causal self-attention.

use tch::{Kind, Tensor};

use crate::KeyValueCache;

/// Cache of one block's keys and values.
#[derive(Debug, Clone)]
pub(crate) struct BlockCache {
    pub(crate) cache: KeyValueCache,
    pub(crate) block: usize,
}

impl BlockCache {
    /// Returns the cache of a block, if there is a cache.
    pub(crate) fn of(cache: Option<&KeyValueCache>, block: usize) -> Option<Self> {
        cache.map(|cache| Self { cache: cache.clone(), block })
    }

    /// Returns the position of a forward's first token.
    pub(crate) fn first_place(this: Option<&Self>) -> i64 {
        this.map_or(0, |own| own.cache.seen())
    }
}

/// Queries, keys and values, each samples × sequence × heads × width. With grouped queries, several heads of queries
/// share one head of keys and values.
#[derive(Debug)]
pub(crate) struct Heads {
    pub(crate) queries: Tensor,
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
}

impl Heads {
    /// Returns the attention's output, samples × sequence × all heads' width; dropout applies to the attention
    /// weights.
    pub(crate) fn attend(&self, cache: Option<&BlockCache>, dropout: f64) -> Tensor {
        let [q, k, v] = [&self.queries, &self.keys, &self.values].map(|x| x.transpose(1, 2));
        let (first, sequence) = (BlockCache::first_place(cache), q.size()[2]);
        let [k, v] = match cache {
            Some(own) => own.cache.extend(own.block, &k, &v),
            None => [k, v],
        };
        // A single token attends to all tokens before it, so it needs no mask. If several tokens follow cached ones,
        // each attends to one token more than the previous one.
        let is_causal = first == 0 && sequence > 1;
        let mask = (first > 0 && sequence > 1).then(|| {
            let all = Tensor::ones([sequence, first + sequence], (Kind::Bool, q.device()));
            all.tril(first)
        });
        let is_grouped = q.size()[1] != k.size()[1];
        let out = Tensor::scaled_dot_product_attention(
            &q, &k, &v, mask, dropout, is_causal, None, is_grouped,
        );
        let [samples, heads, _, width] = q.size()[..] else { unreachable!("four dimensions") };
        out.transpose(1, 2).reshape([samples, sequence, heads * width])
    }
}
