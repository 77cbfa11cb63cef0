//! Muon: steps along the orthogonalized momentum of whole matrices.

use brimful_torch::optim as fused;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::number_options::{at_least_zero, check_rate, within};
use super::{AdamW, OptimError, StateFormat};
use crate::Result;

/// Muon: the momentum of each matrix is orthogonalized by a few steps of the Newton-Schulz iteration, so that all its
/// singular values become about one. Parameters that are not matrices are updated by [`AdamW`], with the same learning
/// rate, weight decay and state format.
///
/// Embeddings and heads are matrices too, but AdamW suits them better: make them a group
/// ([`Optimizer::group`](crate::optim::Optimizer::group)).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[must_use]
pub struct Muon {
    pub(super) learning_rate: f64,
    weight_decay: f64,
    momentum: f64,
    nesterov: bool,
    coefficients: [f64; 3],
    eps: f64,
    steps: u32,
    adjusted_rate: AdjustedRate,
    #[serde(default)]
    pub(super) state_format: StateFormat,
}

/// Adjustment of [`Muon`]'s learning rate to the shape of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AdjustedRate {
    /// Multiplied by √max(1, rows / columns).
    #[default]
    Original,
    /// Multiplied by 0.2 · √max(rows, columns).
    MatchRmsAdamw,
}

impl Muon {
    /// Returns the default options with this learning rate: weight decay 0.1, Nesterov momentum 0.95, five steps of
    /// the iteration.
    pub fn new(learning_rate: f64) -> Self {
        Self {
            learning_rate,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            coefficients: [3.4445, -4.7750, 2.0315],
            eps: 1e-7,
            steps: 5,
            adjusted_rate: AdjustedRate::Original,
            state_format: StateFormat::F32,
        }
    }

    /// Sets the weight decay, which shrinks the parameters.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay, ..self }
    }

    /// Sets the momentum.
    pub fn momentum(self, momentum: f64) -> Self {
        Self { momentum, ..self }
    }

    /// Sets whether to use Nesterov momentum.
    pub fn nesterov(self, nesterov: bool) -> Self {
        Self { nesterov, ..self }
    }

    /// Sets the number of steps of the iteration, and its three coefficients.
    pub fn iteration(self, steps: u32, coefficients: [f64; 3]) -> Self {
        Self { steps, coefficients, ..self }
    }

    /// Sets the lower bound of the norm by which the momentum is divided before the iteration.
    pub fn eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    /// Sets whether the learning rate is multiplied by 0.2 · √max(rows, columns) of a matrix, which makes a step
    /// as large as a step of AdamW. So AdamW's learning rate and weight decay can be used. The default factor is
    /// √max(1, rows / columns).
    pub fn match_rms_adamw(self, matches: bool) -> Self {
        let adjusted_rate =
            if matches { AdjustedRate::MatchRmsAdamw } else { AdjustedRate::Original };
        Self { adjusted_rate, ..self }
    }

    /// Sets the format of the state.
    pub fn state_format(self, state_format: StateFormat) -> Self {
        Self { state_format, ..self }
    }

    pub(super) fn check(&self) -> Result<()> {
        check_rate(self.learning_rate)?;
        at_least_zero("eps", self.eps)?;
        at_least_zero("weight decay", self.weight_decay)?;
        let Self { momentum, steps, .. } = *self;
        let remedy = "give a number of at least 0 and below 1";
        within("momentum", momentum, (0.0..1.0).contains(&momentum), remedy)?;
        if steps < 100 && self.coefficients.iter().all(|number| number.is_finite()) {
            return Ok(());
        }
        let value = format!("{steps} steps with {:?}", self.coefficients);
        let remedy = "give fewer than 100 steps and finite coefficients";
        Err(OptimError::BadOption { option: "iteration", value, remedy }.into())
    }

    /// Returns the method of parameters that are not matrices.
    pub(super) fn of_others(&self) -> AdamW {
        let adamw = AdamW::new(self.learning_rate).weight_decay(self.weight_decay);
        adamw.state_format(self.state_format)
    }

    /// Returns the settings of the momentum and of a step, before the learning rate is adjusted.
    pub(super) fn options(&self) -> fused::Options {
        let Self { learning_rate: rate, weight_decay, momentum, nesterov, .. } = *self;
        fused::Options {
            rule: fused::Rule::Direction,
            rate,
            weight_decay,
            decoupled: true,
            betas: (momentum, 0.0),
            eps: 0.0,
            nesterov,
        }
    }

    /// Returns the dtype and the number of elements of the scratch memory for a matrix that this device updates.
    pub(super) fn scratch(work: &Tensor, device: Device) -> (Kind, usize) {
        let kind = match work.kind() {
            Kind::Double => Kind::Double,
            // Products in bf16 are faster on a GPU, and as good: the iteration need not converge.
            _ if device.is_cuda() => Kind::BFloat16,
            _ => Kind::Float,
        };
        let size = work.size();
        (kind, fused::muon_scratch(size[0] as usize, size[1] as usize))
    }

    pub(super) fn update(
        &self,
        one: &fused::Update<'_>,
        options: fused::Options,
        scratch: &Tensor,
        rate: Option<&Tensor>,
    ) -> Result<()> {
        let size = one.parameter.size();
        let (rows, columns) = (size[0] as f64, size[1] as f64);
        let ratio = match self.adjusted_rate {
            AdjustedRate::Original => (rows / columns).max(1.0).sqrt(),
            AdjustedRate::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
        };
        // Weight decay is multiplied by the rate, and must not change with the adjustment.
        let (rate_of_step, decay) = (options.rate * ratio, options.weight_decay / ratio);
        let options = fused::Options { rate: rate_of_step, weight_decay: decay, ..options };
        let Self { coefficients, steps, eps, .. } = *self;
        let muon = fused::MuonOptions { coefficients, steps, eps };
        Ok(fused::muon(one, &options, &muon, scratch, rate)?)
    }
}
