//! A linear layer, its weights in either order, to which LoRA can be added.

use brimful_torch::projection::projection;
use tch::Tensor;
use tch::nn::{Module, Path};

use super::lora::LowRank;

/// What the rows of a projection's weight stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightOrder {
    /// Outputs × inputs, as most models have it.
    #[default]
    OutputsFirst,
    /// Inputs × outputs, as GPT-2 has it.
    InputsFirst,
}

/// What a projection is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProjectionConfig {
    /// How far its weights spread at the start.
    pub spread: f64,
    /// Whether it has a bias, which is 0 at the start.
    pub bias: bool,
    /// What the rows of its weight stand for.
    pub order: WeightOrder,
}

/// A linear layer over the last dimension: `weight`, `bias` if there is one, and what LoRA adds where the
/// layer is built for [`Layers::lora`](crate::Layers::lora).
#[derive(Debug)]
pub struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
    order: WeightOrder,
    adapter: Option<LowRank>,
}

impl Projection {
    /// From so many numbers to so many.
    pub fn new(path: &Path, inputs: i64, outputs: i64, config: ProjectionConfig) -> Self {
        let ProjectionConfig { spread, bias, order } = config;
        let shape = match order {
            WeightOrder::OutputsFirst => [outputs, inputs],
            WeightOrder::InputsFirst => [inputs, outputs],
        };
        let weight = spread_weight(path, &shape, spread);
        let bias = bias.then(|| path.zeros("bias", &[outputs]));
        Self { weight, bias, order, adapter: LowRank::wanted(path, inputs, outputs) }
    }

    /// Its bias, which [`Projection::forward_unbiased`] leaves to what follows.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Without the bias, for an activation that adds it on the way.
    pub fn forward_unbiased(&self, x: &Tensor) -> Tensor {
        self.project(x, None)
    }

    fn project(&self, x: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let mut shape = x.size();
        let inputs = shape.pop().unwrap_or_default();
        let rows = x.reshape([-1, inputs]);
        let inputs_first = self.order == WeightOrder::InputsFirst;
        let out = projection(&rows, &self.weight, bias, inputs_first)
            .unwrap_or_else(|error| panic!("{error}"));
        let out = match &self.adapter {
            Some(adapter) => adapter.add_to(out, &rows),
            None => out,
        };
        shape.push(out.size()[1]);
        out.view(&shape[..])
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.project(x, self.bias.as_ref())
    }
}

/// A variable `weight` of normally distributed numbers, drawn in place: tch's own way takes the memory of two more
/// of them on the way.
pub fn spread_weight(path: &Path, shape: &[i64], spread: f64) -> Tensor {
    let weight = path.zeros("weight", shape);
    let _itself = tch::no_grad(|| weight.shallow_clone().normal_(0.0, spread));
    weight
}
