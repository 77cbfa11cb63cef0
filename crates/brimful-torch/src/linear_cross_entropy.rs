//! A linear layer and the cross-entropy of its output, computed in chunks so that large logits are never stored
//! whole.

use tch::Tensor;

use crate::error::TorchError;
use crate::{cuda_object, ffi, owned, raw, raw_or_null};

/// Tensors and settings of the layer and the loss.
#[derive(Debug, Clone, Copy)]
pub struct LossHead<'a> {
    /// Weight, classes × width.
    pub weight: &'a Tensor,
    /// Bias, one number a class.
    pub bias: Option<&'a Tensor>,
    /// Weight of each class in the loss; 1 if absent.
    pub class_weights: Option<&'a Tensor>,
    /// Label smoothing: the share of each target that is spread over all classes.
    pub smoothing: f64,
    /// Target value of positions that do not count.
    pub ignored: i64,
    /// Most bytes that the logits of a chunk of positions may take.
    pub chunk_bytes: u64,
}

/// Sum over positions, and the divisor that makes it a mean.
#[derive(Debug)]
pub struct SumAndDivisor {
    /// Sum of losses, 0-dim, in f32 for half precision.
    pub sum: Tensor,
    /// Sum of the class weights of the targets that count, 0-dim, in f64.
    pub divisor: Tensor,
}

/// Returns the loss of hidden states (… × width) at integer targets (…). A target that is neither a class nor the
/// ignored value makes the loss NaN.
///
/// # Errors
/// When shapes, dtypes or devices do not match, or memory runs out.
pub fn linear_cross_entropy(
    hidden: &Tensor,
    targets: &Tensor,
    head: LossHead<'_>,
) -> Result<SumAndDivisor, TorchError> {
    let LossHead { weight, bias, class_weights, smoothing, ignored, chunk_bytes } = head;
    cuda_object::load_for(hidden);
    let chunk_bytes = i64::try_from(chunk_bytes).unwrap_or(i64::MAX);
    // SAFETY: every tensor outlives the call; a missing bias or class weights are null. libtorch checks that they
    // match.
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
