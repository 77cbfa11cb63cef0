//! Format of an optimizer's state: f32, bf16, or 8 bits with scales.

use brimful_torch::optim::GROUP;
use serde::{Deserialize, Serialize};
use tch::Kind;

/// Format of the averages that an optimizer keeps for each parameter. Arithmetic is in f32 whatever the format.
/// An f64 parameter has its averages in f64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StateFormat {
    /// Four bytes a number.
    #[default]
    #[serde(rename = "f32")]
    F32,
    /// Two bytes a number, with stochastic rounding: changes smaller than the last digit still add up over many
    /// steps.
    #[serde(rename = "bf16")]
    Bf16,
    /// One byte a number, with an f32 scale for each group of 128 consecutive numbers, and stochastic rounding. A
    /// byte holds the square root of the number divided by the largest number of its group, or the fourth root for
    /// averages of squares.
    #[serde(rename = "8bit")]
    EightBit,
}

impl StateFormat {
    /// Returns the dtype of the elements of moment number `at` of a parameter of this dtype.
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

/// Returns whether elements of this dtype have scales.
pub(super) fn is_eight_bit(kind: Kind) -> bool {
    matches!(kind, Kind::Int8 | Kind::Uint8)
}

/// Returns the number of scales for this many 8-bit elements.
pub(super) fn scales_of(elements: usize) -> usize {
    elements.div_ceil(GROUP)
}
