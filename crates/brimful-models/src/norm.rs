//! BatchNorm that all models here share.

use brimful::nn::{BatchNorm, BatchNormConfig, BatchNormPolicy};
use tch::nn::Path;

/// Builds a BatchNorm that starts as the identity.
pub(crate) fn batch_norm2d(path: &Path, channels: i64, policy: BatchNormPolicy) -> BatchNorm {
    let config = BatchNormConfig { policy, ..Default::default() };
    brimful::nn::batch_norm2d(path, channels, config)
}
