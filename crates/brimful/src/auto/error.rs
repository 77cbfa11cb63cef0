//! Error for a step that runs out of memory at every size of the micro-batches.

use thiserror::Error;

use crate::batch::enumerate;
use crate::oom::OutOfMemory;
use brimful_plan::bytes::Bytes;

/// Out of memory at every size of the micro-batches.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "memory runs out even with a micro-batch of one sample ({}): {}{available} free; \
     recompute activations, take a smaller model or dtype, or spread the layers over \
     more devices. The last error: {}",
    tried_in_words(tried), needed.map(|needed| format!("more than {needed} needed, ")).unwrap_or_default(), cause.message
)]
#[non_exhaustive]
pub struct DoesNotFit {
    /// Sizes that were tried.
    pub tried: Vec<usize>,
    /// Predicted need of one sample, where it is known.
    pub needed: Option<Bytes>,
    /// Bytes that were free.
    pub available: Bytes,
    /// Error of the last tried.
    pub cause: Box<OutOfMemory>,
}

fn tried_in_words(sizes: &[usize]) -> String {
    match sizes {
        [] => "before the first one was run".into(),
        sizes => format!("tried {}", enumerate(sizes)),
    }
}
