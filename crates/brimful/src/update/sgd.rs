//! Stochastic gradient descent, optionally with momentum.

use brimful_torch::optim as fused;
use serde::{Deserialize, Serialize};

use super::number_options::{at_least_zero, check_rate, within};
use super::{OptimError, StateFormat};
use crate::Result;

/// Stochastic gradient descent: *p ← p − rate · d*, where the direction *d* is the gradient, or with
/// momentum a running sum of gradients.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[must_use]
pub struct Sgd {
    pub(super) learning_rate: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
    /// Absent from files of earlier versions.
    #[serde(default)]
    pub(super) state_format: StateFormat,
}

impl Sgd {
    /// Returns plain gradient descent with this learning rate.
    pub fn new(learning_rate: f64) -> Self {
        Self {
            learning_rate,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            state_format: StateFormat::F32,
        }
    }

    /// Sets the momentum: the share of the last direction that is kept.
    pub fn momentum(self, momentum: f64) -> Self {
        Self { momentum, ..self }
    }

    /// Sets the dampening: the share of the gradient that is left out of the direction.
    pub fn dampening(self, dampening: f64) -> Self {
        Self { dampening, ..self }
    }

    /// Sets the weight decay: the share of the parameter that is added to its gradient.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay, ..self }
    }

    /// Sets whether to use Nesterov momentum. Needs momentum, and no dampening.
    pub fn nesterov(self, nesterov: bool) -> Self {
        Self { nesterov, ..self }
    }

    /// Sets the format of the state.
    pub fn state_format(self, state_format: StateFormat) -> Self {
        Self { state_format, ..self }
    }

    pub(super) fn check(&self) -> Result<()> {
        check_rate(self.learning_rate)?;
        at_least_zero("momentum", self.momentum)?;
        at_least_zero("weight decay", self.weight_decay)?;
        within("dampening", self.dampening, self.dampening.is_finite(), "give a finite number")?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let value = format!("on with momentum {}, dampening {}", self.momentum, self.dampening);
            let remedy = "give it a momentum above 0 and no dampening";
            return Err(OptimError::BadOption { option: "nesterov", value, remedy }.into());
        }
        Ok(())
    }

    pub(super) fn has_momentum(&self) -> bool {
        self.momentum != 0.0
    }

    pub(super) fn options(&self) -> fused::Options {
        let Self { learning_rate: rate, momentum, dampening, weight_decay, nesterov, .. } = *self;
        fused::Options {
            rule: fused::Rule::Sgd,
            rate,
            weight_decay,
            decoupled: false,
            betas: (momentum, dampening),
            eps: 0.0,
            nesterov,
        }
    }
}
