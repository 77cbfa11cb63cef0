//! The batch normalisation of every model here, chosen in one place.

use brimful::nn::BatchNorm;
use tch::nn::Path;

/// Starts as the identity, and moves its running statistics once a step.
pub(crate) fn batch_norm2d(path: &Path, channels: i64) -> BatchNorm {
    brimful::nn::batch_norm2d(path, channels, Default::default())
}
