//! A linear layer and the cross-entropy of what comes out of it, without its logits being whole
//! where they are many.

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

/// What the layer and the loss are made of.
#[derive(Debug, Clone, Copy)]
pub struct LossHead<'a> {
    /// Classes × width.
    pub weight: &'a Tensor,
    /// One number a class.
    pub bias: Option<&'a Tensor>,
    /// What each class counts for; 1 without.
    pub class_weights: Option<&'a Tensor>,
    /// The part of each target that is spread over all classes.
    pub smoothing: f64,
    /// The target of places that do not count.
    pub ignored: i64,
    /// How many bytes the logits of a chunk of places may take.
    pub chunk_bytes: u64,
}

/// A sum over places, and what it is to be divided by for their mean.
#[derive(Debug)]
pub struct SumAndDivisor {
    /// The sum of losses, 0-dim, in f32 for halves.
    pub sum: Tensor,
    /// The sum of the class weights of targets that count, 0-dim, in f64.
    pub divisor: Tensor,
}

/// The loss of hidden states (… × width) at integer targets (…). A target that is neither a class nor
/// ignored makes it NaN.
///
/// # Errors
/// When shapes, kinds or devices do not match, or memory runs out.
pub fn linear_cross_entropy(
    hidden: &Tensor,
    targets: &Tensor,
    head: LossHead<'_>,
) -> Result<SumAndDivisor, TorchError> {
    let LossHead { weight, bias, class_weights, smoothing, ignored, chunk_bytes } = head;
    cuda_object::load_for(hidden);
    let chunk_bytes = i64::try_from(chunk_bytes).unwrap_or(i64::MAX);
    // SAFETY: every tensor is valid, or null where that is allowed; libtorch checks that they match.
    let both = unsafe {
        ffi::brimful_linear_cross_entropy(
            raw(hidden),
            raw(weight),
            raw_or_null(bias),
            raw(targets),
            raw_or_null(class_weights),
            smoothing,
            ignored,
            chunk_bytes,
        )
    };
    let [sum, divisor] = both?.map(owned);
    Ok(SumAndDivisor { sum, divisor })
}
