//! BatchNorm by the statistics of a whole mini-batch, while each layer sees one micro-batch at a time.
//!
//! With N values per channel in all, x̂ = (x − μ) / √(σ² + ε) and y = w x̂ + b, the gradient of x is
//!
//! ```text
//!   w / √(σ² + ε) · dy                                 the gradient with fixed statistics
//! − w / √(σ² + ε) / N · (Σ dy + x̂ Σ dy x̂)              the rest, with sums over all micro-batches
//! ```
//!
//! A micro-batch's own backward computes the first line and its share of both sums, which are the gradients of
//! weight and bias. So each micro-batch is normalised with *probes*: copies of weight and bias, whose gradients
//! are taken out after each backward. Once all micro-batches have run backward, the two sums are the gradients of
//! weight and bias; and the second line, a BatchNorm of x with another weight and bias, is added to each
//! micro-batch's gradient.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use brimful_torch::batch_norm::{Addend, NormInput, batch_norm};
use tch::{Kind, Tensor};

use crate::Result;
use crate::nn::kernels::reported;
use crate::statistics::{Running, WholeBatch, WholeStatistics};

thread_local! {
    static BUILT: RefCell<Option<Vec<ExactNorm>>> = const { RefCell::new(None) };
}

/// Runs `f`; returns the exact layers that it builds, and its result.
pub(crate) fn built_in<T>(f: impl FnOnce() -> T) -> (Vec<ExactNorm>, T) {
    let outer = BUILT.replace(Some(Vec::new()));
    let result = f();
    (BUILT.replace(outer).unwrap_or_default(), result)
}

/// Reports a newly built layer to [`built_in`], if that is running.
pub(super) fn tell_of(norm: ExactNorm) {
    BUILT.with_borrow_mut(|built| {
        if let Some(built) = built {
            built.push(norm);
        }
    });
}

/// Shared state of an exact BatchNorm layer.
#[derive(Debug)]
pub(crate) struct ExactNorm {
    pub(super) running: Running,
    /// The layer's weight and bias, if it has any.
    pub(super) affine: [Option<Tensor>; 2],
    pub(super) eps: f64,
    pub(super) place: LentPlace,
}

/// Statistics that normalise every micro-batch of one mini-batch.
#[derive(Debug)]
pub(crate) struct WholeBatchNorm {
    mean: Tensor,
    variance: Tensor,
    /// − w / √(σ² + ε) / N, kept for the backward of earlier layers: when that backward runs, this layer's weight
    /// may no longer be on the device.
    factor: Tensor,
    /// Weight and bias in the dtype of the statistics.
    affine: [Tensor; 2],
    /// Copies of weight and bias as leaves, which collect the gradients of the current micro-batch.
    probes: [Tensor; 2],
    /// True if weight or bias is trained.
    trains: bool,
    eps: f64,
}

/// Statistics that normalise one micro-batch.
#[derive(Debug)]
pub(crate) struct NormStatistics {
    pub(super) mean: Tensor,
    pub(super) variance: Tensor,
    /// Copies of weight and bias, which collect their gradients.
    pub(crate) probes: [Tensor; 2],
    /// Input whose statistics were counted.
    input: Tensor,
}

impl ExactNorm {
    /// Combines the statistics of all micro-batches for inputs of this dtype, and records them for the running
    /// statistics.
    pub(crate) fn finalize(&self, whole: WholeBatch, kind: Kind) -> Result<WholeBatchNorm> {
        let WholeStatistics { count, mean, variance } = whole.finalize(&self.running, kind)?;
        let [weight, bias] = &self.affine;
        // Copies, because the device buffers of an offloaded stage may hold another stage's weights by the time
        // the stage recomputes.
        let of_kind = |own: &Tensor| own.f_detach()?.f_to_dtype(mean.kind(), false, true);
        let scale = weight.as_ref().map_or_else(|| mean.f_ones_like(), of_kind)?;
        let offset = bias.as_ref().map_or_else(|| mean.f_zeros_like(), of_kind)?;
        let mut one_over = variance.f_add_scalar(self.eps)?.f_rsqrt_()?;
        let factor = one_over.f_mul_(&scale)?.f_div_scalar_(-(count as f64))?;
        let probe = |of: &Tensor| of.f_detach()?.f_set_requires_grad(true);
        let probes = [probe(&scale)?, probe(&offset)?];
        let trains = self.trained().next().is_some();
        let affine = [scale, offset];
        Ok(WholeBatchNorm { mean, variance, factor, affine, probes, trains, eps: self.eps })
    }

    /// Returns weight and bias if they are trained, each with its index among a micro-batch's probes.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        let here = self.affine.iter().enumerate().filter_map(|(at, p)| Some((at, p.as_ref()?)));
        here.filter(|(_, parameter)| parameter.requires_grad())
    }

    /// Makes the layer normalise by these statistics until the guard is dropped.
    pub(crate) fn lend(&self, statistics: NormStatistics) -> LentStatistics {
        self.place.set(Some(statistics));
        LentStatistics(self.place.clone())
    }
}

impl WholeBatchNorm {
    /// Returns the statistics that normalise this micro-batch.
    pub(crate) fn statistics_of(&self, input: &Tensor) -> NormStatistics {
        // The sums are not needed if neither the layer nor a layer before it is trained.
        let asked = self.trains || input.requires_grad();
        let probes = if asked { &self.probes } else { &self.affine };
        NormStatistics {
            mean: self.mean.shallow_clone(),
            variance: self.variance.shallow_clone(),
            probes: probes.each_ref().map(Tensor::shallow_clone),
            input: input.shallow_clone(),
        }
    }

    /// Returns the weight and bias of the BatchNorm that computes the missing part of the input's gradient. `sums`
    /// has the gradients of the probes, summed over all micro-batches (2 × channels).
    pub(crate) fn missing(&self, sums: &Tensor) -> Result<[Tensor; 2]> {
        let both = sums.f_mul(&self.factor)?;
        Ok([both.f_select(0, 0)?, both.f_select(0, 1)?])
    }

    /// Returns a micro-batch's gradient with the missing part added.
    pub(crate) fn completed(
        &self,
        x: &Tensor,
        gradient: Option<&Tensor>,
        [weight, bias]: &[Tensor; 2],
    ) -> Result<Tensor> {
        let _without = tch::no_grad_guard();
        let norm = NormInput {
            x,
            weight: Some(weight),
            bias: Some(bias),
            running: Some((&self.mean, &self.variance)),
            training: false,
            momentum: 0.0,
            eps: self.eps,
        };
        reported(batch_norm(&norm, gradient.map_or(Addend::Nothing, Addend::Tensor), false))
    }
}

impl NormStatistics {
    /// Returns whether this is the input whose statistics were counted.
    pub(super) fn is_of(&self, input: &Tensor) -> bool {
        self.input.data_ptr() == input.data_ptr() && self.input.size() == input.size()
    }

    pub(crate) fn share(&self) -> Self {
        Self {
            mean: self.mean.shallow_clone(),
            variance: self.variance.shallow_clone(),
            probes: self.probes.each_ref().map(Tensor::shallow_clone),
            input: self.input.shallow_clone(),
        }
    }
}

/// Slot from which a layer takes the statistics for its next input.
#[derive(Debug, Clone, Default)]
pub(super) struct LentPlace(Arc<Mutex<Option<NormStatistics>>>);

impl LentPlace {
    fn set(&self, norm: Option<NormStatistics>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = norm;
    }

    /// Returns the statistics, and keeps them for a second use of the layer.
    pub(super) fn shared(&self) -> Option<NormStatistics> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(NormStatistics::share)
    }
}

/// Guard of the statistics that normalise a layer's inputs; a drop of the guard removes them, even during a panic.
pub(crate) struct LentStatistics(LentPlace);

impl Drop for LentStatistics {
    fn drop(&mut self) {
        self.0.set(None);
    }
}
