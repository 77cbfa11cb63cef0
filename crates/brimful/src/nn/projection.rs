//! A linear layer, its weights in either order, to which LoRA can be added.

use brimful_torch::projection::{Outputs, projection, projections};
use tch::Tensor;
use tch::nn::{Module, Path};

use super::first_values::spread_weight;
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

    /// What several make of the same `x`: as each by itself, but on a card the gradient of `x` is added up as it is
    /// computed.
    ///
    /// # Panics
    /// When shapes or kinds do not match, the weights are in different orders, or memory runs out.
    pub fn forward_all<const N: usize>(all: [&Self; N], x: &Tensor) -> [Tensor; N] {
        let rows = rows_of(x);
        let out = Self::project_all(&all, &rows, Outputs::Apart);
        let mut out = all.into_iter().zip(out).map(|(one, out)| one.adapted(out, &rows));
        all.map(|_| like(out.next().expect("one for each"), x))
    }

    /// The same side by side, in the last dimension of one tensor.
    ///
    /// # Panics
    /// As [`Projection::forward_all`], and when there are none.
    pub fn forward_joined<const N: usize>(all: [&Self; N], x: &Tensor) -> Tensor {
        if all.iter().any(|one| one.adapter.is_some()) {
            return Tensor::cat(&Self::forward_all(all, x), -1);
        }
        like(Self::project_all(&all, &rows_of(x), Outputs::Joined).remove(0), x)
    }

    /// Without what LoRA adds.
    fn project_all(all: &[&Self], rows: &Tensor, outputs: Outputs) -> Vec<Tensor> {
        let order = all.first().map(|first| first.order).unwrap_or_default();
        assert!(all.iter().all(|one| one.order == order), "their weights have different orders");
        let layers: Vec<_> = all.iter().map(|one| (&one.weight, one.bias.as_ref())).collect();
        let inputs_first = order == WeightOrder::InputsFirst;
        projections(rows, &layers, inputs_first, outputs).unwrap_or_else(|error| panic!("{error}"))
    }

    fn project(&self, x: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let rows = rows_of(x);
        let inputs_first = self.order == WeightOrder::InputsFirst;
        let out = projection(&rows, &self.weight, bias, inputs_first)
            .unwrap_or_else(|error| panic!("{error}"));
        like(self.adapted(out, &rows), x)
    }

    fn adapted(&self, out: Tensor, rows: &Tensor) -> Tensor {
        match &self.adapter {
            Some(adapter) => adapter.add_to(out, rows),
            None => out,
        }
    }
}

/// A row for each place of `x`.
fn rows_of(x: &Tensor) -> Tensor {
    let inputs = x.size().pop().unwrap_or_default();
    x.reshape([-1, inputs])
}

/// Rows at the places of `x`.
fn like(rows: Tensor, x: &Tensor) -> Tensor {
    let mut shape = x.size();
    shape.pop();
    shape.push(rows.size()[1]);
    rows.view(&shape[..])
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.project(x, self.bias.as_ref())
    }
}
