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
        // In f64: far along a sequence the angles are large, and only their fractions of a turn count.
        let exact = (Kind::Double, Device::Cpu);
        let exponents = Tensor::arange(width / 2, exact) * (-2.0 / width as f64);
        let speeds = (exponents * base.ln()).exp();
        let angles = Tensor::arange(context, exact).outer(&speeds);
        let table = |exact: Tensor| exact.to_kind(Kind::Float).to_device(device);
        Self { cos: table(angles.cos()), sin: table(angles.sin()) }
    }

    /// Queries or keys (samples × sequence × heads × width), turned by their places.
    ///
    /// # Errors
    /// When they are of another width or device, or longer than the context.
    pub fn turn(&self, x: &Tensor) -> Result<Tensor> {
        let sequence = x.size().get(1).copied().unwrap_or_default().min(self.cos.size()[0]);
        let of_sequence = |table: &Tensor| table.narrow(0, 0, sequence);
        told(rotary(x, &of_sequence(&self.cos), &of_sequence(&self.sin)))
    }
}
