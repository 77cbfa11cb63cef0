//! Convolution that all models here share.

use tch::nn::init::{FanInOut, NonLinearity, NormalOrUniform};
use tch::nn::{self, Init, Path};

/// A convolution whose output is smaller than its input only by its stride. It has no bias, because a
/// normalisation follows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConvShape {
    pub(crate) from: i64,
    pub(crate) to: i64,
    /// Height and width of the kernel.
    pub(crate) kernel: [i64; 2],
    pub(crate) stride: [i64; 2],
}

impl ConvShape {
    pub(crate) fn square(from: i64, to: i64, kernel: i64, stride: i64) -> Self {
        Self { from, to, kernel: [kernel; 2], stride: [stride; 2] }
    }

    /// Builds it with He's normal initialisation.
    pub(crate) fn build(self, path: &Path) -> nn::Conv2D {
        let Self { from, to, kernel, stride } = self;
        let config = nn::ConvConfigND {
            stride,
            padding: kernel.map(|side| side / 2),
            dilation: [1; 2],
            groups: 1,
            bias: false,
            ws_init: Init::Kaiming {
                dist: NormalOrUniform::Normal,
                fan: FanInOut::FanOut,
                non_linearity: NonLinearity::ReLU,
            },
            bs_init: Init::Const(0.0),
            padding_mode: nn::PaddingMode::Zeros,
        };
        nn::conv(path, from, to, kernel, config)
    }
}

/// Builds a convolution with a square kernel.
pub(crate) fn conv(path: &Path, from: i64, to: i64, kernel: i64, stride: i64) -> nn::Conv2D {
    ConvShape::square(from, to, kernel, stride).build(path)
}
