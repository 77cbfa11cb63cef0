//! A linear layer with its weight in either order and optional LoRA.

use brimful_torch::projection::{Outputs, projection, projections};
use tch::Tensor;
use tch::nn::{Module, Path};

use super::first_values::spread_weight;
use super::lora::LowRank;

/// Settings of a projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProjectionConfig {
    /// Standard deviation of the initial weights.
    pub spread: f64,
    /// True if it has a bias, initially 0.
    pub bias: bool,
    /// True if the weight is inputs × outputs, as in GPT-2; false if it is outputs × inputs, as in most models.
    pub inputs_first: bool,
}

/// A linear layer over the last dimension: `weight`, an optional `bias`, and an adapter if the layer is built
/// for [`Layers::lora`](crate::Layers::lora).
#[derive(Debug)]
pub struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
    inputs_first: bool,
    adapter: Option<LowRank>,
}

impl Projection {
    /// Creates a projection from `inputs` to `outputs` features.
    pub fn new(path: &Path, inputs: i64, outputs: i64, config: ProjectionConfig) -> Self {
        let ProjectionConfig { spread, bias, inputs_first } = config;
        let shape = if inputs_first { [inputs, outputs] } else { [outputs, inputs] };
        let weight = spread_weight(path, &shape, spread);
        let bias = bias.then(|| path.zeros("bias", &[outputs]));
        Self { weight, bias, inputs_first, adapter: LowRank::wanted(path, inputs, outputs) }
    }

    /// Returns the bias, which [`Projection::forward_unbiased`] leaves out.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Projects `x` without the bias, for an activation that adds it.
    pub fn forward_unbiased(&self, x: &Tensor) -> Tensor {
        self.project(x, None)
    }

    /// Applies several projections to one `x`. On a GPU the gradients of `x` are added up as they are computed.
    ///
    /// # Panics
    ///
    /// When shapes or dtypes do not match, the weights are in different orders, or memory runs out.
    pub fn forward_all<const N: usize>(all: [&Self; N], x: &Tensor) -> [Tensor; N] {
        let rows = rows_of(x);
        let out = Self::project_all(&all, &rows, Outputs::Apart);
        let mut out = all.into_iter().zip(out).map(|(one, out)| one.adapted(out, &rows));
        all.map(|_| like(out.next().expect("one for each"), x))
    }

    /// Applies several projections to one `x`, and concatenates the outputs in the last dimension.
    ///
    /// # Panics
    ///
    /// As [`Projection::forward_all`], and when there are no projections.
    pub fn forward_joined<const N: usize>(all: [&Self; N], x: &Tensor) -> Tensor {
        if all.iter().any(|one| one.adapter.is_some()) {
            return Tensor::cat(&Self::forward_all(all, x), -1);
        }
        like(Self::project_all(&all, &rows_of(x), Outputs::Joined).remove(0), x)
    }

    /// Applies the projections without their adapters.
    fn project_all(all: &[&Self], rows: &Tensor, outputs: Outputs) -> Vec<Tensor> {
        let inputs_first = all.first().is_some_and(|first| first.inputs_first);
        let is_same = |one: &&Self| one.inputs_first == inputs_first;
        assert!(all.iter().all(is_same), "their weights have different orders");
        let layers: Vec<_> = all.iter().map(|one| (&one.weight, one.bias.as_ref())).collect();
        projections(rows, &layers, inputs_first, outputs).unwrap_or_else(|error| panic!("{error}"))
    }

    fn project(&self, x: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let rows = rows_of(x);
        let out = projection(&rows, &self.weight, bias, self.inputs_first)
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

/// Flattens `x` to one row per position.
fn rows_of(x: &Tensor) -> Tensor {
    let inputs = x.size().pop().unwrap_or_default();
    x.reshape([-1, inputs])
}

/// Reshapes rows to the positions of `x`.
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
