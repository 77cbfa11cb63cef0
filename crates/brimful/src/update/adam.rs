//! Adam and `AdamW`, which differ in the one line that applies the weight decay.

use brimful_torch::optim as fused;
use serde::{Deserialize, Serialize};

use super::number_options::{at_least_zero, check_rate};
use super::{OptimError, StateFormat};
use crate::Result;

/// Adam: steps along the average gradient, divided by the root of the average squared gradient. Weight decay
/// is added to the gradient.
pub type Adam = AdamWith<false>;

/// Adam with decoupled weight decay: the parameter shrinks by *rate · decay*, whatever its gradient.
pub type AdamW = AdamWith<true>;

/// Configuration common to [`Adam`] and [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[must_use]
pub struct AdamWith<const DECOUPLED: bool> {
    pub(super) learning_rate: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    amsgrad: bool,
    /// Absent from files of earlier versions.
    #[serde(default)]
    pub(super) state_format: StateFormat,
}

impl<const DECOUPLED: bool> AdamWith<DECOUPLED> {
    /// Returns the default options with this learning rate: betas 0.9 and 0.999, eps 1e-8, and a weight
    /// decay of 0 for Adam and 0.01 for `AdamW`.
    pub fn new(learning_rate: f64) -> Self {
        Self {
            learning_rate,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: if DECOUPLED { 0.01 } else { 0.0 },
            amsgrad: false,
            state_format: StateFormat::F32,
        }
    }

    /// Sets the decay rates of the averages of gradients and of squared gradients.
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        Self { betas: (beta1, beta2), ..self }
    }

    /// Sets the number that is added to the divisor, to keep it from zero.
    pub fn eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    /// Sets the weight decay.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay, ..self }
    }

    /// Sets whether to divide by the largest average of squared gradients so far, not by the present one.
    pub fn amsgrad(self, amsgrad: bool) -> Self {
        Self { amsgrad, ..self }
    }

    /// Sets the format of the state.
    pub fn state_format(self, state_format: StateFormat) -> Self {
        Self { state_format, ..self }
    }

    pub(super) fn check(&self) -> Result<()> {
        check_rate(self.learning_rate)?;
        at_least_zero("eps", self.eps)?;
        at_least_zero("weight decay", self.weight_decay)?;
        let (beta1, beta2) = self.betas;
        if [beta1, beta2].iter().all(|beta| (0.0..1.0).contains(beta)) {
            return Ok(());
        }
        let remedy = "give two numbers of at least 0 and below 1";
        Err(OptimError::BadOption { option: "betas", value: format!("({beta1}, {beta2})"), remedy }
            .into())
    }

    /// Returns the number of moments of a parameter.
    pub(super) fn moments(&self) -> usize {
        if self.amsgrad { 3 } else { 2 }
    }

    pub(super) fn options(&self) -> fused::Options {
        let Self { learning_rate: rate, betas, eps, weight_decay, .. } = *self;
        fused::Options {
            rule: fused::Rule::Adam,
            rate,
            weight_decay,
            decoupled: DECOUPLED,
            betas,
            eps,
            nesterov: false,
        }
    }
}
