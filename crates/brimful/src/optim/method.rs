//! Choice of an optimization method, and the code common to all methods.

use brimful_torch::optim as fused;
use serde::{Deserialize, Serialize};

use super::{Adam, AdamW, OptimError, Sgd, StateFormat};
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

    /// Returns the number format of the moments.
    pub(super) fn format(&self) -> StateFormat {
        of_method!(self, config => config.state_format)
    }

    /// Returns the settings of an update.
    pub(super) fn options(&self) -> fused::Options {
        of_method!(self, config => config.options())
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
