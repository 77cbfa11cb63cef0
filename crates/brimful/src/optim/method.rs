//! Choice of an optimization method, and the code common to all methods.

use brimful_torch::TorchError;
use brimful_torch::optim::LearningRate;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::OptimError;
use super::{Adam, AdamW, Sgd};
use crate::Result;

/// Optimization method: [`Sgd`], [`Adam`] or [`AdamW`], with its options.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Method {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// Adam.
    Adam(Adam),
    /// Adam with decoupled weight decay.
    #[serde(rename = "adamw")]
    AdamW(AdamW),
}

/// Parameters that are updated in one call, with their gradients and state, as parallel lists.
pub(super) struct Lists {
    pub(super) parameters: Vec<Tensor>,
    pub(super) gradients: Vec<Tensor>,
    /// One list for each name in [`Method::moments`].
    pub(super) moments: Vec<Vec<Tensor>>,
    /// Step counters; empty where the method does not count.
    pub(super) steps: Vec<Tensor>,
    /// Whether this is the first step of all of them.
    pub(super) first: bool,
    /// Learning rate as a tensor; `None` for the method's own number.
    pub(super) rate: Option<Tensor>,
}

/// One parameter, or a piece of it, followed by its moments: present values, and memory for the next ones.
pub(super) struct UpdateBeside<'a> {
    pub(super) now: &'a [Tensor],
    pub(super) gradient: &'a Tensor,
    pub(super) next: &'a [Tensor],
    /// Number of this step, counted from 1.
    pub(super) step: f64,
}

impl Lists {
    /// Returns the learning rate: the tensor if there is one, or `number`.
    pub(super) fn rate(&self, number: f64) -> LearningRate<'_> {
        self.rate.as_ref().map_or(LearningRate::Number(number), LearningRate::Tensor)
    }
}

/// Evaluates an expression on the configuration of any method.
macro_rules! of_method {
    ($method:expr, $config:ident => $value:expr) => {
        match $method {
            Method::Sgd($config) => $value,
            Method::Adam($config) => $value,
            Method::AdamW($config) => $value,
        }
    };
}

impl Method {
    /// Returns `sgd`, `adam` or `adamw`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sgd(_) => "sgd",
            Self::Adam(_) => "adam",
            Self::AdamW(_) => "adamw",
        }
    }

    /// Returns the learning rate.
    pub fn learning_rate(&self) -> f64 {
        of_method!(self, config => config.learning_rate)
    }

    pub(super) fn set_learning_rate(&mut self, rate: f64) {
        of_method!(self, config => config.learning_rate = rate)
    }

    /// Returns this method without weight decay.
    pub(super) fn without_decay(self) -> Self {
        of_method!(self, config => config.weight_decay(0.0).into())
    }

    pub(super) fn check(&self) -> Result<()> {
        of_method!(self, config => config.check())
    }

    /// Names of the tensors that are kept for each parameter, with its shape.
    pub(super) fn moments(&self) -> &'static [&'static str] {
        of_method!(self, config => config.moments())
    }

    /// Whether the method counts the steps of each parameter.
    pub(super) fn counts(&self) -> bool {
        !matches!(self, Self::Sgd(_))
    }

    /// Whether the state of a half-precision parameter has the parameter's dtype.
    pub(super) fn half_state(&self) -> bool {
        of_method!(self, config => config.half_state)
    }

    pub(super) fn update(&self, lists: &Lists) -> Result<(), TorchError> {
        of_method!(self, config => config.update(lists))
    }

    /// Updates one parameter out of place in one pass; returns false where the method has no such kernel.
    pub(super) fn update_beside(&self, update: &UpdateBeside<'_>) -> Result<bool, TorchError> {
        match self {
            Self::Sgd(_) => Ok(false),
            Self::Adam(config) => config.update_beside(update),
            Self::AdamW(config) => config.update_beside(update),
        }
    }
}

pub(crate) fn check_rate(rate: f64) -> Result<()> {
    at_least_zero("learning rate", rate)
}

pub(super) fn at_least_zero(option: &'static str, value: f64) -> Result<()> {
    let remedy = "give a finite number of at least 0";
    within(option, value, value >= 0.0 && value.is_finite(), remedy)
}

/// Refuses the value unless it is `good`.
pub(super) fn within(
    option: &'static str,
    value: f64,
    good: bool,
    remedy: &'static str,
) -> Result<()> {
    if good {
        Ok(())
    } else {
        Err(OptimError::BadOption { option, value: value.to_string(), remedy }.into())
    }
}
