//! BatchNorm with a policy for running statistics over micro-batches.

use std::borrow::Borrow;

use brimful_torch::batch_norm::{self, Addend, NormInput, batch_norm, batch_norm_relu_pool};
use tch::Tensor;
use tch::nn::{self, Init};

use crate::Result;
use crate::nn::error::NnError;
use crate::nn::exact::{self, ExactNorm, LentPlace, NormStatistics};
use crate::nn::kernels::reported;
use crate::statistics::{self, Momentum, Running};

/// Policy for running statistics and normalisation over micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BatchNormPolicy {
    /// Running statistics move once a step, as the whole mini-batch would have moved them.
    #[default]
    Deferred,
    /// Running statistics move at every micro-batch, as in a plain loop.
    PerMicroBatch,
    /// Running statistics never move, and normalise in training too.
    Frozen,
    /// Running statistics move once a step, and the whole mini-batch's statistics normalise every micro-batch:
    /// outputs and gradients are those of the full batch. Only for [`Pipeline`](crate::Pipeline)s on one device,
    /// and only for layers added by [`Layers::add_norm`](crate::Layers::add_norm).
    Exact,
}

/// Settings of a BatchNorm layer.
#[derive(Debug, Clone, Copy)]
pub struct BatchNormConfig {
    /// Policy for running statistics and normalisation over micro-batches.
    pub policy: BatchNormPolicy,
    /// Epsilon, which is added to the variance.
    pub eps: f64,
    /// Fraction by which a batch moves the running statistics; `None` makes them the averages of all batches so
    /// far, which a variable `num_batches_tracked` counts.
    pub momentum: Option<f64>,
    /// True if the layer has a weight and a bias.
    pub affine: bool,
}

impl Default for BatchNormConfig {
    fn default() -> Self {
        Self { policy: BatchNormPolicy::default(), eps: 1e-5, momentum: Some(0.1), affine: true }
    }
}

/// A BatchNorm layer.
#[derive(Debug)]
pub struct BatchNorm {
    config: BatchNormConfig,
    dimensions: &'static [usize],
    channels: i64,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running: Running,
    /// Whether a ReLU follows.
    relu: bool,
    /// Statistics that normalise the next input of an exact layer.
    place: LentPlace,
}

/// Creates a BatchNorm layer for inputs of shape N × C or N × C × L.
pub fn batch_norm1d<'a>(
    path: impl Borrow<nn::Path<'a>>,
    channels: i64,
    config: BatchNormConfig,
) -> BatchNorm {
    BatchNorm::new(path.borrow(), &[2, 3], channels, config)
}

/// Creates a BatchNorm layer for inputs of shape N × C × H × W.
pub fn batch_norm2d<'a>(
    path: impl Borrow<nn::Path<'a>>,
    channels: i64,
    config: BatchNormConfig,
) -> BatchNorm {
    BatchNorm::new(path.borrow(), &[4], channels, config)
}

/// Creates a BatchNorm layer for inputs of shape N × C × D × H × W.
pub fn batch_norm3d<'a>(
    path: impl Borrow<nn::Path<'a>>,
    channels: i64,
    config: BatchNormConfig,
) -> BatchNorm {
    BatchNorm::new(path.borrow(), &[5], channels, config)
}

impl BatchNorm {
    fn new(
        path: &nn::Path<'_>,
        dimensions: &'static [usize],
        channels: i64,
        config: BatchNormConfig,
    ) -> Self {
        let affine =
            |name, value| config.affine.then(|| path.var(name, &[channels], Init::Const(value)));
        let norm = Self {
            config,
            dimensions,
            channels,
            weight: affine("weight", 1.0),
            bias: affine("bias", 0.0),
            running: Running::new(
                path.zeros_no_train("running_mean", &[channels]),
                path.ones_no_train("running_var", &[channels]),
                match config.momentum {
                    Some(momentum) => Momentum::Given(momentum),
                    None => Momentum::Average(path.zeros_no_train("num_batches_tracked", &[])),
                },
            ),
            relu: false,
            place: LentPlace::default(),
        };
        if config.policy == BatchNormPolicy::Exact {
            exact::tell_of(ExactNorm {
                running: norm.running.share(),
                affine: norm.affine(),
                eps: config.eps,
                place: norm.place.clone(),
            });
        }
        norm
    }

    /// Normalises `input`, in training by its own statistics. A layer [with a ReLU](Self::with_relu) applies it
    /// too.
    ///
    /// # Errors
    /// When the input has another number of dimensions or channels than the layer.
    pub fn f_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let movement = self.movement(input, train)?;
        reported(batch_norm(&self.over(input, &movement), Addend::Nothing, self.relu))
    }

    /// Normalises `input` and applies a ReLU, fused where there are kernels for it.
    ///
    /// # Errors
    /// As [`f_forward_t`](Self::f_forward_t).
    pub fn f_forward_relu(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let movement = self.movement(input, train)?;
        reported(batch_norm(&self.over(input, &movement), Addend::Nothing, true))
    }

    /// Normalises `input`, adds `residual` and applies a ReLU, fused where there are kernels for it.
    ///
    /// # Errors
    /// As [`f_forward_t`](Self::f_forward_t), and when the shapes differ.
    pub fn f_forward_add_relu(
        &self,
        input: &Tensor,
        residual: &Tensor,
        train: bool,
    ) -> Result<Tensor> {
        let movement = self.movement(input, train)?;
        reported(batch_norm(&self.over(input, &movement), Addend::Tensor(residual), true))
    }

    /// Normalises `input`, normalises `other_input` by `other`, and applies a ReLU to the sum, fused where
    /// there are kernels for it.
    ///
    /// # Errors
    /// As [`f_forward_t`](Self::f_forward_t), and when the shapes differ.
    pub fn f_forward_join_relu(
        &self,
        input: &Tensor,
        other: &Self,
        other_input: &Tensor,
        train: bool,
    ) -> Result<Tensor> {
        let movement = self.movement(input, train)?;
        let other_movement = other.movement(other_input, train)?;
        let addend = Addend::Normed(other.over(other_input, &other_movement));
        reported(batch_norm(&self.over(input, &movement), addend, true))
    }

    /// Normalises `input`, then applies a ReLU and a max pooling of 3×3, stride 2 and padding 1, fused where
    /// there are kernels for it: the stem of a residual network for images of 224×224.
    ///
    /// # Errors
    ///
    /// As [`f_forward_t`](Self::f_forward_t), and when the input is not a batch of images.
    pub fn f_forward_relu_pool(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let movement = self.movement(input, train)?;
        reported(batch_norm_relu_pool(&self.over(input, &movement)))
    }

    /// Calls [`f_forward_relu`](Self::f_forward_relu).
    ///
    /// # Panics
    /// When that call fails.
    pub fn forward_relu(&self, input: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_relu(input, train))
    }

    /// Calls [`f_forward_add_relu`](Self::f_forward_add_relu).
    ///
    /// # Panics
    /// When that call fails.
    pub fn forward_add_relu(&self, input: &Tensor, residual: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_add_relu(input, residual, train))
    }

    /// Calls [`f_forward_join_relu`](Self::f_forward_join_relu).
    ///
    /// # Panics
    /// When that call fails.
    pub fn forward_join_relu(
        &self,
        input: &Tensor,
        other: &Self,
        other_input: &Tensor,
        train: bool,
    ) -> Tensor {
        or_panic(self.f_forward_join_relu(input, other, other_input, train))
    }

    /// Calls [`f_forward_relu_pool`](Self::f_forward_relu_pool).
    ///
    /// # Panics
    /// When that call fails.
    pub fn forward_relu_pool(&self, input: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_relu_pool(input, train))
    }

    /// Adds a ReLU after the layer: `forward_t` applies the layer and the ReLU, fused where there are kernels for
    /// it.
    #[must_use]
    pub fn with_relu(self) -> Self {
        Self { relu: true, ..self }
    }

    /// Returns the statistics that normalise the input, and those that it updates: in evaluation, or if the layer
    /// is frozen, the running statistics, unchanged; in training, the input's or the mini-batch's own.
    fn movement(&self, input: &Tensor, train: bool) -> Result<Movement> {
        let shape = input.size();
        let channels = self.channels;
        if !self.dimensions.contains(&shape.len()) || shape[1] != channels {
            let dimensions = self.dimensions;
            return Err(NnError::BatchNormShape { dimensions, channels, shape }.into());
        }
        if !train {
            return Ok(self.unmoved());
        }
        let target = match self.config.policy {
            BatchNormPolicy::Frozen => return Ok(self.unmoved()),
            BatchNormPolicy::Exact => match self.place.shared() {
                Some(met) => return self.met(met, input),
                // Outside a step, an input is the whole mini-batch.
                None if !statistics::in_a_step() => statistics::at_once(&self.running)?,
                None => return Err(NnError::NotAddedByNorm { channels }.into()),
            },
            BatchNormPolicy::Deferred => {
                let count = shape.iter().product::<i64>() / channels;
                statistics::deferred(&self.running, input, count)?
            }
            BatchNormPolicy::PerMicroBatch => statistics::at_once(&self.running)?,
        };
        let momentum = target.as_ref().map_or(0.0, |(.., momentum)| *momentum);
        let running = target.map(|(mean, variance, _)| (mean, variance));
        Ok(Movement { running, affine: self.affine(), training: true, momentum })
    }

    /// Returns a movement that normalises by the running statistics and leaves them unchanged.
    fn unmoved(&self) -> Movement {
        let Running { mean, variance, .. } = &self.running;
        Movement::none(mean.shallow_clone(), variance.shallow_clone(), self.affine())
    }

    /// Returns weight and bias, if there are any.
    fn affine(&self) -> [Option<Tensor>; 2] {
        [&self.weight, &self.bias].map(|one| one.as_ref().map(Tensor::shallow_clone))
    }

    /// Returns a movement that normalises by the whole mini-batch's statistics, as if they were running
    /// statistics.
    fn met(&self, met: NormStatistics, input: &Tensor) -> Result<Movement> {
        if !met.is_of(input) {
            return Err(NnError::ChangedInput { shape: input.size() }.into());
        }
        Ok(Movement::none(met.mean, met.variance, met.probes.map(Some)))
    }

    fn over<'a>(&'a self, x: &'a Tensor, movement: &'a Movement) -> NormInput<'a> {
        NormInput {
            x,
            weight: movement.affine[0].as_ref(),
            bias: movement.affine[1].as_ref(),
            running: movement.running.as_ref().map(|(mean, variance)| (mean, variance)),
            training: movement.training,
            momentum: movement.momentum,
            eps: self.config.eps,
        }
    }
}

/// Weight, bias and statistics for one input, which either updates the statistics or is normalised by them.
struct Movement {
    running: Option<(Tensor, Tensor)>,
    /// Weight and bias.
    affine: [Option<Tensor>; 2],
    training: bool,
    momentum: f64,
}

impl Movement {
    /// Returns a movement that normalises by these statistics and leaves them unchanged.
    fn none(mean: Tensor, variance: Tensor, affine: [Option<Tensor>; 2]) -> Self {
        Self { running: Some((mean, variance)), affine, training: false, momentum: 0.0 }
    }
}

/// Returns a handle to the tensor for a second use, such as a shortcut. If the tensor is a BatchNorm's output,
/// that layer's own backward adds up the gradients of both uses. For any other tensor, returns a plain handle.
///
/// # Errors
///
/// When memory runs out.
pub fn f_second_use(tensor: &Tensor) -> Result<Tensor> {
    Ok(batch_norm::second_use(tensor)?)
}

/// Calls [`f_second_use`].
///
/// # Panics
/// When that call fails.
pub fn second_use(tensor: &Tensor) -> Tensor {
    or_panic(f_second_use(tensor))
}

fn or_panic(result: Result<Tensor>) -> Tensor {
    result.unwrap_or_else(|error| panic!("{error}"))
}

impl nn::ModuleT for BatchNorm {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_t(input, train))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::nn::ModuleT;
    use tch::{Device, Kind, nn::VarStore};

    #[test]
    fn alone_it_is_the_layer_of_tch() {
        let (ours, theirs) = (VarStore::new(Device::Cpu), VarStore::new(Device::Cpu));
        let config = nn::BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() };
        let plain = nn::batch_norm2d(theirs.root(), 3, config);
        for policy in [BatchNormPolicy::Deferred, BatchNormPolicy::PerMicroBatch] {
            let config = BatchNormConfig { policy, ..Default::default() };
            let layer = batch_norm2d(ours.root() / format!("{policy:?}"), 3, config);
            let mut reference =
                nn::batch_norm2d(theirs.root() / format!("{policy:?}"), 3, Default::default());
            reference.ws = plain.ws.as_ref().map(Tensor::shallow_clone);
            let x = Tensor::randn([4, 3, 2, 2], (Kind::Float, Device::Cpu));
            for train in [true, true, false] {
                assert_eq!(layer.forward_t(&x, train), reference.forward_t(&x, train));
            }
            assert_eq!(layer.running.variance, reference.running_var);
        }
    }

    #[test]
    fn a_wrong_input_is_an_error_with_both_shapes() {
        let store = VarStore::new(Device::Cpu);
        let layer = batch_norm1d(store.root(), 3, Default::default());
        let x = Tensor::zeros([4, 5], (Kind::Float, Device::Cpu));
        let error = layer.f_forward_t(&x, true).expect_err("5 channels").to_string();
        assert!(error.contains("3 channels") && error.contains("[4, 5]"), "{error}");
    }
}
