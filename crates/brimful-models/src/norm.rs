//! The batch normalisation of every model here, chosen in one place.

use tch::nn::{self, Init, ModuleT, Path};

/// Starts as the identity, as torchvision's does; tch's own default is a random scale.
pub(crate) fn batch_norm2d(path: &Path, channels: i64) -> impl ModuleT + use<> {
    let config = nn::BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() };
    nn::batch_norm2d(path, channels, config)
}
