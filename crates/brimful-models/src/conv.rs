//! The convolution of every model here, chosen in one place.

use tch::nn::init::{FanInOut, NonLinearity, NormalOrUniform};
use tch::nn::{self, Init, Path};

/// A square convolution that keeps the size but for its stride, without a bias because a
/// normalisation follows, and with He's normal weights.
pub(crate) fn conv(path: &Path, from: i64, to: i64, kernel: i64, stride: i64) -> nn::Conv2D {
    conv_rectangular(path, from, to, [kernel; 2], [stride; 2])
}

/// The same with a kernel and a stride of height and width.
pub(crate) fn conv_rectangular(
    path: &Path,
    from: i64,
    to: i64,
    kernel: [i64; 2],
    stride: [i64; 2],
) -> nn::Conv2D {
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
