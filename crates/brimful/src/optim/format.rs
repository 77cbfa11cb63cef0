//! Number format of an optimizer's state.

use brimful_torch::optim::GROUP;
use serde::{Deserialize, Serialize};
use tch::Kind;

/// Number format of the averages that an optimizer keeps for each parameter. Arithmetic is in f32 whatever the
/// format. An f64 parameter has its averages in f64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StateFormat {
    /// Four bytes a number.
    #[default]
    #[serde(rename = "f32")]
    F32,
    /// Two bytes a number, rounded up or down at random: an average that changes by less than its last digit at a
    /// step does change over many.
    #[serde(rename = "bf16")]
    Bf16,
    /// One byte a number, in groups of 128 consecutive ones with an f32 scale; rounded as `Bf16`. A byte holds the
    /// root of the number's share of its group's largest, or the fourth root for averages of squares.
    #[serde(rename = "8bit")]
    EightBit,
}

impl StateFormat {
    /// Dtype of the elements of moment number `at` of a parameter of this dtype.
    pub(super) fn kind(self, parameter: Kind, at: usize) -> Kind {
        match (parameter, self) {
            (Kind::Double, _) => Kind::Double,
            (_, Self::F32) => Kind::Float,
            (_, Self::Bf16) => Kind::BFloat16,
            // The first moment is signed, the others are squares.
            (_, Self::EightBit) if at == 0 => Kind::Int8,
            (_, Self::EightBit) => Kind::Uint8,
        }
    }
}

/// Whether elements of this dtype have scales.
pub(super) fn is_eight_bit(kind: Kind) -> bool {
    matches!(kind, Kind::Int8 | Kind::Uint8)
}

/// Number of scales of so many 8-bit elements.
pub(super) fn scales_of(elements: usize) -> usize {
    elements.div_ceil(GROUP)
}
