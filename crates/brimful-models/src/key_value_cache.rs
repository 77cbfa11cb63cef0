//! Cache of keys and values of earlier tokens, so that a forward computes only the next ones.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

/// Cache of the keys and values of a transformer's blocks. Clones share one cache.
///
/// A forward takes the tokens after those already seen. If the forward is run again, as after a failed step, the
/// result is the same. After a successful forward, [`KeyValueCache::advance`] counts its tokens as seen.
///
/// ```
/// use brimful_models::{Gpt, KeyValueCache, gpt, gpt_with_cache};
/// use tch::nn::{ModuleT, VarStore};
/// use tch::{Device, Kind, Tensor};
///
/// let shape = Gpt { layers: 2, width: 16, heads: 2, context: 8, ..Gpt::gpt2_small() };
/// let cache = KeyValueCache::new(8);
/// let store = VarStore::new(Device::Cpu);
/// let model = gpt_with_cache(&shape, &cache).build(&store.root())?;
/// let tokens = Tensor::randint(50_257, [1, 8], (Kind::Int64, Device::Cpu));
/// let first = model.forward_t(&tokens.narrow(1, 0, 7), false);
/// cache.advance(7);
/// let last = model.forward_t(&tokens.narrow(1, 7, 1), false);
/// cache.clear();
/// let whole = model.forward_t(&tokens, false);
/// assert!(whole.allclose(&Tensor::cat(&[first, last], 1), 1e-4, 1e-5, false));
/// # Ok::<(), brimful::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KeyValueCache {
    shared: Arc<Mutex<SeenTokens>>,
}

#[derive(Debug)]
struct SeenTokens {
    count: i64,
    /// Capacity in tokens.
    capacity: i64,
    /// Keys and values of each block, samples × heads × capacity × width.
    blocks: HashMap<usize, [Tensor; 2]>,
}

impl KeyValueCache {
    /// Makes an empty cache with a capacity in tokens. Memory is allocated with the first tokens.
    pub fn new(capacity: i64) -> Self {
        let seen = SeenTokens { count: 0, capacity, blocks: HashMap::new() };
        Self { shared: Arc::new(Mutex::new(seen)) }
    }

    /// Returns the number of tokens seen.
    pub fn seen(&self) -> i64 {
        self.lock().count
    }

    /// Returns the capacity in tokens.
    pub fn capacity(&self) -> i64 {
        self.lock().capacity
    }

    /// Counts the tokens of the last forward as seen.
    pub fn advance(&self, tokens: i64) {
        self.lock().count += tokens;
    }

    /// Forgets all tokens; the next forward may have another number of samples.
    pub fn clear(&self) {
        let mut seen = self.lock();
        seen.count = 0;
        seen.blocks.clear();
    }

    /// Appends a block's keys and values (samples × heads × sequence × width), and returns the block's keys and
    /// values of all tokens so far.
    ///
    /// # Panics
    /// Panics if the tokens exceed the capacity.
    pub(crate) fn extend(&self, block: usize, keys: &Tensor, values: &Tensor) -> [Tensor; 2] {
        let mut seen = self.lock();
        let SeenTokens { count, capacity, .. } = *seen;
        let new = keys.size()[2];
        assert!(
            count + new <= capacity,
            "{new} tokens after {count} exceed the cache's capacity of {capacity}: clear the \
             cache, or make it larger"
        );
        let kept = seen.blocks.entry(block);
        let kept = kept.or_insert_with(|| [keys, values].map(|like| empty(like, capacity)));
        [(&kept[0], keys), (&kept[1], values)].map(|(kept, new)| {
            kept.narrow(2, count, new.size()[2]).copy_(&new.detach());
            kept.narrow(2, 0, count + new.size()[2])
        })
    }

    fn lock(&self) -> MutexGuard<'_, SeenTokens> {
        // A forward that panics leaves the cache's tensors intact.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Allocates a tensor like this one, with a capacity of `capacity` tokens.
fn empty(like: &Tensor, capacity: i64) -> Tensor {
    let mut shape = like.size();
    shape[2] = capacity;
    Tensor::empty(&shape[..], (like.kind(), like.device()))
}
