//! BatchNorm that says what a micro-batch is to its running statistics.

use std::borrow::Borrow;

use brimful_torch::batch_norm::{self, Addend, NormInput, batch_norm, batch_norm_relu_pool};
use tch::Tensor;
use tch::nn::{self, Init};
use thiserror::Error;

use crate::Result;
use crate::batch::enumerate;
use crate::nn::exact::{self, ExactNorm, Met, MetPlace};
use crate::nn::kernels::told;
use crate::statistics::{self, Momentum, Running};

/// An input that a BatchNorm layer cannot normalise.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BatchNormError {
    /// Another shape than the layer is made for.
    #[error(
        "a BatchNorm layer of {channels} channels takes an input of {} dimensions with the channels \
         second, but got the shape {shape:?}",
        enumerate(dimensions)
    )]
    Shape {
        /// Numbers of dimensions that the layer takes.
        dimensions: &'static [usize],
        /// Its channels.
        channels: i64,
        /// The input's shape.
        shape: Vec<i64>,
    },
    /// An exact layer where the other micro-batches cannot be waited for.
    #[error(
        "BatchNormPolicy::Exact needs the statistics of all micro-batches before it normalises the \
         first, which a pipeline has, of a list in which the layer was added by `add_norm`:\n    \
         let layers = Layers::new().add(\"conv\", conv).add_norm(\"bn\", |p| batch_norm2d(p, \
         {channels}, exact)).add(\"rest\", rest);\n    \
         let mut pipe = Pipeline::builder(layers).micro_batches(Size::Fixed(2)).build()?;\n    \
         pipe.backward(&x, &y, |out: Tensor, y| Loss::mean(out.cross_entropy_for_logits(y)))?;\n\
         In a closure, and in replicas of one, take BatchNormPolicy::Deferred"
    )]
    NotMet {
        /// The layer's channels.
        channels: i64,
    },
    /// An exact layer that normalises something else than what its layer of the list was given.
    #[error(
        "a layer added by `add_norm` normalises the first tensor that it is given, as it is, but this one \
         has made one of shape {shape:?} from it: do that in a layer before it"
    )]
    OtherInput {
        /// The shape of what is to be normalised.
        shape: Vec<i64>,
    },
}

/// What a micro-batch does to running statistics, and what normalises it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BatchNormPolicy {
    /// They move once a step, to where the whole mini-batch would have moved them.
    #[default]
    Deferred,
    /// They move at every micro-batch, as with a plain loop.
    PerMicroBatch,
    /// They never move, and normalise in training too.
    Frozen,
    /// They move once a step, and the whole mini-batch's statistics normalise every micro-batch: outputs
    /// and gradients are those of the full batch. For [`Pipeline`](crate::Pipeline)s on one device, of
    /// lists to which the layer is added by [`Layers::add_norm`](crate::Layers::add_norm).
    Exact,
}

/// How a BatchNorm layer is made.
#[derive(Debug, Clone, Copy)]
pub struct BatchNormConfig {
    /// What a micro-batch does to running statistics, and what normalises it.
    pub policy: BatchNormPolicy,
    /// Added to the variance.
    pub eps: f64,
    /// How far a batch moves the running statistics; `None` makes them the averages of all batches so
    /// far, which a variable `num_batches_tracked` counts.
    pub momentum: Option<f64>,
    /// Whether the layer has a weight and a bias.
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
    /// What normalises the next input of an exact layer.
    place: MetPlace,
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
            place: MetPlace::default(),
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

    /// Normalises `input`, in training by its own statistics.
    ///
    /// # Errors
    /// When the input has another number of dimensions or channels than the layer.
    pub fn f_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let movement = self.movement(input, train)?;
        told(batch_norm(&self.over(input, &movement), Addend::Nothing, false))
    }

    /// The same and a ReLU, in one where there are kernels for it.
    ///
    /// # Errors
    /// As [`f_forward_t`](Self::f_forward_t).
    pub fn f_forward_relu(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let movement = self.movement(input, train)?;
        told(batch_norm(&self.over(input, &movement), Addend::Nothing, true))
    }

    /// Normalises `input`, adds `residual` and lets ReLU have the sum, in one where there are kernels
    /// for it.
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
        told(batch_norm(&self.over(input, &movement), Addend::Tensor(residual), true))
    }

    /// Normalises `input`, adds what `other` makes of `other_input` and lets ReLU have the sum, in one
    /// where there are kernels for it.
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
        told(batch_norm(&self.over(input, &movement), addend, true))
    }

    /// Normalises `input`, then ReLU and a pooling of 3×3, stride 2 and padding 1, in one where there
    /// are kernels for it: what pictures of 224×224 enter a residual network by.
    ///
    /// # Errors
    /// As [`f_forward_t`](Self::f_forward_t), and when the input is no picture.
    pub fn f_forward_relu_pool(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let movement = self.movement(input, train)?;
        told(batch_norm_relu_pool(&self.over(input, &movement)))
    }

    /// As [`f_forward_relu`](Self::f_forward_relu).
    ///
    /// # Panics
    /// On its errors.
    pub fn forward_relu(&self, input: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_relu(input, train))
    }

    /// As [`f_forward_add_relu`](Self::f_forward_add_relu).
    ///
    /// # Panics
    /// On its errors.
    pub fn forward_add_relu(&self, input: &Tensor, residual: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_add_relu(input, residual, train))
    }

    /// As [`f_forward_join_relu`](Self::f_forward_join_relu).
    ///
    /// # Panics
    /// On its errors.
    pub fn forward_join_relu(
        &self,
        input: &Tensor,
        other: &Self,
        other_input: &Tensor,
        train: bool,
    ) -> Tensor {
        or_panic(self.f_forward_join_relu(input, other, other_input, train))
    }

    /// As [`f_forward_relu_pool`](Self::f_forward_relu_pool).
    ///
    /// # Panics
    /// On its errors.
    pub fn forward_relu_pool(&self, input: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_relu_pool(input, train))
    }

    /// The layer and a ReLU behind it as one module.
    pub fn with_relu(self) -> BatchNormRelu {
        BatchNormRelu { norm: self }
    }

    /// Where the statistics of this input come from and go to.
    fn movement(&self, input: &Tensor, train: bool) -> Result<Movement> {
        let shape = input.size();
        let channels = self.channels;
        if !self.dimensions.contains(&shape.len()) || shape[1] != channels {
            let dimensions = self.dimensions;
            return Err(BatchNormError::Shape { dimensions, channels, shape }.into());
        }
        if !train {
            return Ok(self.unmoved());
        }
        let target = match self.config.policy {
            BatchNormPolicy::Frozen => return Ok(self.unmoved()),
            BatchNormPolicy::Exact => match self.place.shared() {
                Some(met) => return self.met(met, input),
                // Alone, an input is the whole mini-batch.
                None if !statistics::in_a_step() => statistics::at_once(&self.running)?,
                None => return Err(BatchNormError::NotMet { channels }.into()),
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

    /// Normalised by the running statistics.
    fn unmoved(&self) -> Movement {
        let Running { mean, variance, .. } = &self.running;
        Movement::none(mean.shallow_clone(), variance.shallow_clone(), self.affine())
    }

    /// Weight and bias.
    fn affine(&self) -> [Option<Tensor>; 2] {
        [&self.weight, &self.bias].map(|one| one.as_ref().map(Tensor::shallow_clone))
    }

    /// Normalised by the whole mini-batch's statistics, as if they were running ones.
    fn met(&self, met: Met, input: &Tensor) -> Result<Movement> {
        if !met.is_of(input) {
            return Err(BatchNormError::OtherInput { shape: input.size() }.into());
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

/// What one input does to running statistics: those that it moves, or that normalise it.
struct Movement {
    running: Option<(Tensor, Tensor)>,
    /// Weight and bias.
    affine: [Option<Tensor>; 2],
    training: bool,
    momentum: f64,
}

impl Movement {
    /// Normalised by these statistics, which stay as they are.
    fn none(mean: Tensor, variance: Tensor, affine: [Option<Tensor>; 2]) -> Self {
        Self { running: Some((mean, variance)), affine, training: false, momentum: 0.0 }
    }
}

/// The same numbers for a second use of them, such as a shortcut: where they are a BatchNorm's, the
/// gradients of both uses are added in its own backward; elsewhere it is the tensor itself.
///
/// # Errors
/// When there is no memory for it.
pub fn f_second_use(tensor: &Tensor) -> Result<Tensor> {
    Ok(batch_norm::second_use(tensor)?)
}

/// As [`f_second_use`].
///
/// # Panics
/// On its errors.
pub fn second_use(tensor: &Tensor) -> Tensor {
    or_panic(f_second_use(tensor))
}

fn or_panic(result: Result<Tensor>) -> Tensor {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// A BatchNorm layer with a ReLU behind it, in one where there are kernels for it.
#[derive(Debug)]
pub struct BatchNormRelu {
    norm: BatchNorm,
}

impl nn::ModuleT for BatchNorm {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_t(input, train))
    }
}

impl nn::ModuleT for BatchNormRelu {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.norm.forward_relu(input, train)
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
