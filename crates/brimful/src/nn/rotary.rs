//! Rotary positions: what tells a transformer of today where a token is.

use brimful_torch::rotary::rotary;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::nn::kernels::told;

/// Angles for every place of a sequence. They are no variables: nothing of them is saved.
///
/// "RoFormer: Enhanced Transformer with Rotary Position Embedding", Su et al., 2021, in the order of Llama's
/// weights: number `i` of a head goes with number `i + width/2`, by an angle of `place · base^(-2i/width)`.
#[derive(Debug)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// For sequences of up to `context` tokens and heads of this width, on a device. Llama's base is
    /// 10,000, or larger for longer contexts.
    pub fn new(context: i64, width: i64, base: f64, device: Device) -> Self {
        Self::with_speeds(context, &Self::speeds(width, base), device)
    }

    /// By which angle each pair of a head of this width turns from one place to the next.
    pub fn speeds(width: i64, base: f64) -> Vec<f64> {
        (0..width / 2).map(|pair| base.powf(-2.0 * pair as f64 / width as f64)).collect()
    }

    /// The same with speeds of one's own, a pair each: contexts are stretched by slowing them down.
    pub fn with_speeds(context: i64, speeds: &[f64], device: Device) -> Self {
        // In f64: far along a sequence the angles are large, and only their fractions of a turn count.
        let exact = (Kind::Double, Device::Cpu);
        let angles = Tensor::arange(context, exact).outer(&Tensor::from_slice(speeds));
        let table = |exact: Tensor| exact.to_kind(Kind::Float).to_device(device);
        Self { cos: table(angles.cos()), sin: table(angles.sin()) }
    }

    /// The same angles, not copied.
    pub fn shallow_clone(&self) -> Self {
        Self { cos: self.cos.shallow_clone(), sin: self.sin.shallow_clone() }
    }

    /// How many places it has angles for.
    pub fn context(&self) -> i64 {
        self.cos.size()[0]
    }

    /// Queries or keys (samples × sequence × heads × width), turned by their places.
    ///
    /// # Errors
    /// When they are of another width or device, or longer than the context.
    pub fn turn(&self, x: &Tensor) -> Result<Tensor> {
        self.turn_from(x, 0)
    }

    /// The same of a sequence whose first token is at this place.
    ///
    /// # Errors
    /// As [`Rotary::turn`].
    pub fn turn_from(&self, x: &Tensor, first: i64) -> Result<Tensor> {
        let first = first.clamp(0, self.context());
        let sequence = x.size().get(1).copied().unwrap_or_default().min(self.context() - first);
        let of_sequence = |table: &Tensor| table.narrow(0, first, sequence);
        told(rotary(x, &of_sequence(&self.cos), &of_sequence(&self.sin)))
    }
}
