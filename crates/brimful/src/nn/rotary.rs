//! Rotary position embedding.

use brimful_torch::rotary::rotary;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::nn::kernels::reported;

/// Angles for every position of a sequence. They are not variables and are not saved.
///
/// "RoFormer: Enhanced Transformer with Rotary Position Embedding", Su et al., 2021, in the order of Llama's
/// weights: number `i` of a head forms a pair with number `i + width/2`, which rotates by an angle of `position
/// · base^(-2i/width)`.
#[derive(Debug)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Creates the angles for sequences of up to `context` tokens and heads of this width, on a device. Llama's
    /// base is 10,000, or larger for longer contexts.
    pub fn new(context: i64, width: i64, base: f64, device: Device) -> Self {
        Self::with_speeds(context, &Self::speeds(width, base), device)
    }

    /// Returns the rotation of each pair of a head of this width from one position to the next, in radians.
    pub fn speeds(width: i64, base: f64) -> Vec<f64> {
        (0..width / 2).map(|pair| base.powf(-2.0 * pair as f64 / width as f64)).collect()
    }

    /// Creates the angles from one speed per pair: slower rotations extend the context.
    pub fn with_speeds(context: i64, speeds: &[f64], device: Device) -> Self {
        // In f64: far along a sequence the angles are large, but only the remainders of a full rotation count,
        // which f32 would round coarsely.
        let exact = (Kind::Double, Device::Cpu);
        let angles = Tensor::arange(context, exact).outer(&Tensor::from_slice(speeds));
        let table = |exact: Tensor| exact.to_kind(Kind::Float).to_device(device);
        Self { cos: table(angles.cos()), sin: table(angles.sin()) }
    }

    /// Returns a handle to the same angles, without a copy.
    pub fn shallow_clone(&self) -> Self {
        Self { cos: self.cos.shallow_clone(), sin: self.sin.shallow_clone() }
    }

    /// Returns the number of positions for which there are angles.
    pub fn context(&self) -> i64 {
        self.cos.size()[0]
    }

    /// Rotates queries or keys (samples × sequence × heads × width) by their positions.
    ///
    /// # Errors
    ///
    /// When their width or device differs, or the sequence is longer than the context.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        self.apply_from(x, 0)
    }

    /// Rotates as [`Rotary::apply`] does, for a sequence whose first token is at position `first`.
    ///
    /// # Errors
    /// As [`Rotary::apply`].
    pub fn apply_from(&self, x: &Tensor, first: i64) -> Result<Tensor> {
        let first = first.clamp(0, self.context());
        let sequence = x.size().get(1).copied().unwrap_or_default().min(self.context() - first);
        let of_sequence = |table: &Tensor| table.narrow(0, first, sequence);
        reported(rotary(x, &of_sequence(&self.cos), &of_sequence(&self.sin)))
    }
}
