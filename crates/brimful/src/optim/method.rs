//! The choice of an optimization method, and what all methods have in common.

use brimful_torch::TorchError;
use brimful_torch::optim::LearningRate;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::OptimError;
use super::{Adam, AdamW, Sgd};
use crate::Result;

/// How parameters are updated: by [`Sgd`], [`Adam`] or [`AdamW`], with their options.
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

/// Parameters that are updated in one call, and what belongs to each, as parallel lists.
pub(super) struct Lists {
    pub(super) parameters: Vec<Tensor>,
    pub(super) gradients: Vec<Tensor>,
    /// One list a name of [`Method::moments`].
    pub(super) moments: Vec<Vec<Tensor>>,
    /// Empty where the method does not count.
    pub(super) steps: Vec<Tensor>,
    /// Whether this is the first step of all of them.
    pub(super) first: bool,
    /// The learning rate, where it is not the method's own number.
    pub(super) rate: Option<Tensor>,
}

/// One parameter, or a piece of it, and its moments behind it: as they are, and room for what they will be.
pub(super) struct UpdateBeside<'a> {
    pub(super) now: &'a [Tensor],
    pub(super) gradient: &'a Tensor,
    pub(super) next: &'a [Tensor],
    /// Counted from 1.
    pub(super) step: f64,
}

impl Lists {
    /// How far to go, where the method says `number`.
    pub(super) fn rate(&self, number: f64) -> LearningRate<'_> {
        self.rate.as_ref().map_or(LearningRate::Number(number), LearningRate::Tensor)
    }
}

/// The same expression of whichever method it is.
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
    /// `sgd`, `adam` or `adamw`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sgd(_) => "sgd",
            Self::Adam(_) => "adam",
            Self::AdamW(_) => "adamw",
        }
    }

    /// How far a step goes.
    pub fn learning_rate(&self) -> f64 {
        of_method!(self, config => config.learning_rate)
    }

    pub(super) fn set_learning_rate(&mut self, rate: f64) {
        of_method!(self, config => config.learning_rate = rate)
    }

    /// The same method, under which parameters do not shrink by themselves.
    pub(super) fn without_decay(self) -> Self {
        of_method!(self, config => config.weight_decay(0.0).into())
    }

    pub(super) fn check(&self) -> Result<()> {
        of_method!(self, config => config.check())
    }

    /// The names of the tensors that are kept of each parameter, shaped like it.
    pub(super) fn moments(&self) -> &'static [&'static str] {
        of_method!(self, config => config.moments())
    }

    /// Whether the steps of each parameter are counted.
    pub(super) fn counts(&self) -> bool {
        !matches!(self, Self::Sgd(_))
    }

    /// Whether a half parameter's state is of its own kind.
    pub(super) fn half_state(&self) -> bool {
        of_method!(self, config => config.half_state)
    }

    pub(super) fn update(&self, lists: &Lists) -> Result<(), TorchError> {
        of_method!(self, config => config.update(lists))
    }

    /// The same of one parameter, beside what it is; tells whether that can be done in one pass.
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
