//! Stochastic gradient descent, optionally with momentum.

use brimful_torch::TorchError;
use brimful_torch::optim as fused;
use serde::{Deserialize, Serialize};

use super::Method;
use super::OptimError;
use super::method::{self, Lists};
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
    pub(super) half_state: bool,
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
            half_state: false,
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

    /// Sets whether the state of an f16 or bf16 parameter is kept in the parameter's own dtype, not in f32.
    pub fn half_state(self, half_state: bool) -> Self {
        Self { half_state, ..self }
    }

    pub(super) fn check(&self) -> Result<()> {
        method::check_rate(self.learning_rate)?;
        method::at_least_zero("momentum", self.momentum)?;
        method::at_least_zero("weight decay", self.weight_decay)?;
        method::within(
            "dampening",
            self.dampening,
            self.dampening.is_finite(),
            "give a finite number",
        )?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let value = format!("on with momentum {}, dampening {}", self.momentum, self.dampening);
            let remedy = "give it a momentum above 0 and no dampening";
            return Err(OptimError::BadOption { option: "nesterov", value, remedy }.into());
        }
        Ok(())
    }

    pub(super) fn moments(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    pub(super) fn update(&self, lists: &Lists) -> Result<(), TorchError> {
        let options = fused::SgdOptions {
            momentum: self.momentum,
            dampening: self.dampening,
            weight_decay: self.weight_decay,
            nesterov: self.nesterov,
            // Without a buffer there is no first step, and libtorch would print a warning.
            first: lists.first && self.momentum != 0.0,
        };
        let rate = lists.rate(self.learning_rate);
        let buffers = lists.moments.first().map(Vec::as_slice);
        fused::sgd(&lists.parameters, &lists.gradients, buffers, rate, &options)
    }
}

impl From<Sgd> for Method {
    fn from(config: Sgd) -> Self {
        Self::Sgd(config)
    }
}
