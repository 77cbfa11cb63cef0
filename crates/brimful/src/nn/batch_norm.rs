//! BatchNorm that says what a micro-batch is to its running statistics.

use std::borrow::Borrow;

use tch::Tensor;
use tch::nn::{self, Init};
use thiserror::Error;

use crate::Result;
use crate::batch::enumerate;
use crate::statistics::{self, Running};

/// An input that a BatchNorm layer is not made for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "a BatchNorm layer of {channels} channels takes an input of {} dimensions with the channels \
     second, but got the shape {shape:?}",
    enumerate(dimensions)
)]
#[non_exhaustive]
pub struct BatchNormError {
    /// Numbers of dimensions that the layer takes.
    pub dimensions: &'static [usize],
    /// Its channels.
    pub channels: i64,
    /// The input's shape.
    pub shape: Vec<i64>,
}

/// What a micro-batch does to running statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BatchNormPolicy {
    /// They move once a step, to where the whole mini-batch would have moved them.
    #[default]
    Deferred,
    /// They move at every micro-batch, as with a plain loop.
    PerMicroBatch,
    /// They never move, and normalise in training too.
    Frozen,
}

/// How a BatchNorm layer is made.
#[derive(Debug, Clone, Copy)]
pub struct BatchNormConfig {
    /// What a micro-batch does to running statistics.
    pub policy: BatchNormPolicy,
    /// Added to the variance.
    pub eps: f64,
    /// How far a batch moves the running statistics.
    pub momentum: f64,
    /// Whether the layer has a weight and a bias.
    pub affine: bool,
}

impl Default for BatchNormConfig {
    fn default() -> Self {
        Self { policy: BatchNormPolicy::default(), eps: 1e-5, momentum: 0.1, affine: true }
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
}

/// BatchNorm of an input of shape N × C or N × C × L.
pub fn batch_norm1d<'a>(
    path: impl Borrow<nn::Path<'a>>,
    channels: i64,
    config: BatchNormConfig,
) -> BatchNorm {
    BatchNorm::new(path.borrow(), &[2, 3], channels, config)
}

/// BatchNorm of an input of shape N × C × H × W.
pub fn batch_norm2d<'a>(
    path: impl Borrow<nn::Path<'a>>,
    channels: i64,
    config: BatchNormConfig,
) -> BatchNorm {
    BatchNorm::new(path.borrow(), &[4], channels, config)
}

/// BatchNorm of an input of shape N × C × D × H × W.
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
        Self {
            config,
            dimensions,
            channels,
            weight: affine("weight", 1.0),
            bias: affine("bias", 0.0),
            running: Running::new(
                path.zeros_no_train("running_mean", &[channels]),
                path.ones_no_train("running_var", &[channels]),
                config.momentum,
            ),
        }
    }

    /// Normalises `input`, in training by its own statistics.
    ///
    /// # Errors
    /// When the input has another number of dimensions or channels than the layer.
    pub fn f_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let shape = input.size();
        let channels = self.channels;
        if !self.dimensions.contains(&shape.len()) || shape[1] != channels {
            return Err(BatchNormError { dimensions: self.dimensions, channels, shape }.into());
        }
        if !train || self.config.policy == BatchNormPolicy::Frozen {
            let Running { mean, variance, .. } = &self.running;
            return self.normalise(input, Some(mean), Some(variance), false, 0.0);
        }
        let target = match self.config.policy {
            BatchNormPolicy::Deferred => {
                let count = shape.iter().product::<i64>() / channels;
                statistics::deferred(&self.running, input, count)?
            }
            _ => statistics::at_once(&self.running)?,
        };
        match target {
            None => self.normalise(input, None, None, true, 0.0),
            Some((mean, variance, momentum)) => {
                self.normalise(input, Some(&mean), Some(&variance), true, momentum)
            }
        }
    }

    fn normalise(
        &self,
        input: &Tensor,
        mean: Option<&Tensor>,
        variance: Option<&Tensor>,
        train: bool,
        momentum: f64,
    ) -> Result<Tensor> {
        let (weight, bias) = (self.weight.as_ref(), self.bias.as_ref());
        let eps = self.config.eps;
        Ok(Tensor::f_batch_norm(input, weight, bias, mean, variance, train, momentum, eps, true)?)
    }
}

impl nn::ModuleT for BatchNorm {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.f_forward_t(input, train).unwrap_or_else(|error| panic!("{error}"))
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
