//! Adafactor: second moments of rows and columns, not of elements.

use brimful_torch::optim as fused;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::number_options::{at_least_zero, check_rate, within};
use super::{OptimError, StateFormat};
use crate::Result;

/// Adafactor: divides the gradient by the root of its average square. Averages are kept only for the rows and the
/// columns of a parameter's last two dimensions, so the state of a matrix is a row and a column. The learning rate is
/// relative to the parameter's own size, and falls at least with the inverse root of the step's number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[must_use]
pub struct Adafactor {
    pub(super) learning_rate: f64,
    beta2_decay: f64,
    /// Least average of squares; `None` for the machine epsilon of the dtype.
    least_square: Option<f64>,
    least_size: f64,
    threshold: f64,
    weight_decay: f64,
}

impl Adafactor {
    /// Returns the default options with this learning rate, such as 1e-2: beta2 decay -0.8, threshold 1, no weight
    /// decay.
    pub fn new(learning_rate: f64) -> Self {
        Self {
            learning_rate,
            beta2_decay: -0.8,
            least_square: None,
            least_size: 1e-3,
            threshold: 1.0,
            weight_decay: 0.0,
        }
    }

    /// Sets the exponent *d*: step *t*, counted from 1, enters the averages with the weight *t^d*.
    pub fn beta2_decay(self, beta2_decay: f64) -> Self {
        Self { beta2_decay, ..self }
    }

    /// Sets two lower bounds: of the averages of squares (by default the machine epsilon of the dtype), and of the
    /// parameter's size (root mean square), to which the learning rate is relative.
    pub fn eps(self, least_square: f64, least_size: f64) -> Self {
        Self { least_square: Some(least_square), least_size, ..self }
    }

    /// Sets the threshold of clipping: an update with a larger root mean square is scaled down to it.
    pub fn threshold(self, threshold: f64) -> Self {
        Self { threshold, ..self }
    }

    /// Sets the weight decay, which shrinks the parameters.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay, ..self }
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { beta2_decay, threshold, .. } = *self;
        check_rate(self.learning_rate)?;
        at_least_zero("weight decay", self.weight_decay)?;
        at_least_zero("eps", self.least_square.unwrap_or_default())?;
        at_least_zero("eps", self.least_size)?;
        let remedy = "give a number of at most 0";
        within("beta2 decay", beta2_decay, beta2_decay <= 0.0, remedy)?;
        if threshold >= 1.0 {
            return Ok(());
        }
        let (value, remedy) = (threshold.to_string(), "give a number of at least 1");
        Err(OptimError::BadOption { option: "threshold", value, remedy }.into())
    }

    /// Returns the format of the averages, which cannot be set.
    pub(super) fn state_format() -> StateFormat {
        StateFormat::F32
    }

    /// Returns the settings of a step along its direction.
    pub(super) fn options(&self) -> fused::Options {
        let Self { learning_rate: rate, weight_decay, .. } = *self;
        fused::Options {
            rule: fused::Rule::Sgd,
            rate,
            weight_decay,
            decoupled: true,
            betas: (0.0, 0.0),
            eps: 0.0,
            nesterov: false,
        }
    }

    /// Returns the dtype and the number of elements of the scratch memory for a parameter.
    pub(super) fn scratch(work: &Tensor) -> (Kind, usize) {
        (computed_in(work.kind()), fused::adafactor_scratch(&work.size()))
    }

    pub(super) fn update(
        &self,
        one: &fused::Update<'_>,
        options: &fused::Options,
        scratch: &Tensor,
        rate: Option<&Tensor>,
    ) -> Result<()> {
        let Self { beta2_decay, threshold, .. } = *self;
        let epsilon = match computed_in(one.parameter.kind()) {
            Kind::Double => f64::EPSILON,
            _ => f32::EPSILON.into(),
        };
        let eps = (self.least_square.unwrap_or(epsilon), self.least_size);
        let factored = fused::AdafactorOptions { beta2_decay, eps, threshold };
        Ok(fused::adafactor(one, options, &factored, scratch, rate)?)
    }
}

fn computed_in(kind: Kind) -> Kind {
    if kind == Kind::Double { kind } else { Kind::Float }
}
