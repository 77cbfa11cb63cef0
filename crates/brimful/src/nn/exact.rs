//! BatchNorm by the statistics of a whole mini-batch, of which each layer sees a micro-batch at a time.
//!
//! With N values a channel in all, x̂ = (x − μ) / √(σ² + ε) and y = w x̂ + b, the gradient of x is
//!
//! ```text
//!   w / √(σ² + ε) · dy                                 what a layer with fixed statistics has
//! − w / √(σ² + ε) / N · (Σ dy + x̂ Σ dy x̂)              what is missing, with sums over all micro-batches
//! ```
//!
//! A micro-batch's own backward gives the first line and its share of both sums, which are the gradients
//! of weight and bias. So each is normalised with *probes*, copies of weight and bias, and both sums are
//! taken out of them after each backward. When all micro-batches are back, they are the gradients of weight and bias, once; and the
//! second line, a BatchNorm of x with another weight and bias, is added to each one's gradient.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use brimful_torch::batch_norm::{Addend, NormInput, batch_norm};
use tch::{Kind, Tensor};

use crate::Result;
use crate::nn::kernels::told;
use crate::statistics::{Running, WholeBatch, WholeStatistics};

thread_local! {
    static BUILT: RefCell<Option<Vec<ExactNorm>>> = const { RefCell::new(None) };
}

/// The exact layers that `f` builds, and what it gives.
pub(crate) fn built_in<T>(f: impl FnOnce() -> T) -> (Vec<ExactNorm>, T) {
    let outer = BUILT.replace(Some(Vec::new()));
    let result = f();
    (BUILT.replace(outer).unwrap_or_default(), result)
}

/// A layer tells of itself where somebody asks.
pub(super) fn tell_of(norm: ExactNorm) {
    BUILT.with_borrow_mut(|built| {
        if let Some(built) = built {
            built.push(norm);
        }
    });
}

/// What others need of an exact BatchNorm layer.
#[derive(Debug)]
pub(crate) struct ExactNorm {
    pub(super) running: Running,
    /// Weight and bias, where it has them.
    pub(super) affine: [Option<Tensor>; 2],
    pub(super) eps: f64,
    pub(super) place: MetPlace,
}

/// What normalises every micro-batch of one mini-batch.
#[derive(Debug)]
pub(crate) struct NormSettled {
    mean: Tensor,
    variance: Tensor,
    /// − w / √(σ² + ε) / N, kept for the backward of what is before the layer: its weight may have left
    /// the device by then.
    factor: Tensor,
    /// Weight and bias in the kind of statistics.
    affine: [Tensor; 2],
    /// The same as leaves, in which the gradients of the micro-batch under way gather.
    probes: [Tensor; 2],
    /// Whether weight or bias are trained.
    trains: bool,
    eps: f64,
}

/// The same for one micro-batch.
#[derive(Debug)]
pub(crate) struct Met {
    pub(super) mean: Tensor,
    pub(super) variance: Tensor,
    /// Copies of weight and bias, in which their gradients gather.
    pub(crate) probes: [Tensor; 2],
    /// What was counted.
    input: Tensor,
}

impl ExactNorm {
    /// All micro-batches are counted: moves the running statistics, for inputs of this kind.
    pub(crate) fn settle(&self, whole: WholeBatch, kind: Kind) -> Result<NormSettled> {
        let WholeStatistics { count, mean, variance } = whole.settle(&self.running, kind)?;
        let [weight, bias] = &self.affine;
        // Copies: those of an offloaded stage lie where another stage's weights do by the time of its recompute.
        let of_kind = |own: &Tensor| own.f_detach()?.f_to_dtype(mean.kind(), false, true);
        let scale = weight.as_ref().map_or_else(|| mean.f_ones_like(), of_kind)?;
        let offset = bias.as_ref().map_or_else(|| mean.f_zeros_like(), of_kind)?;
        let mut one_over = variance.f_add_scalar(self.eps)?.f_rsqrt_()?;
        let factor = one_over.f_mul_(&scale)?.f_div_scalar_(-(count as f64))?;
        let probe = |of: &Tensor| of.f_detach()?.f_set_requires_grad(true);
        let probes = [probe(&scale)?, probe(&offset)?];
        let trains = self.trained().next().is_some();
        let affine = [scale, offset];
        Ok(NormSettled { mean, variance, factor, affine, probes, trains, eps: self.eps })
    }

    /// Which of weight and bias are trained, by their place among a micro-batch's probes.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        let here = self.affine.iter().enumerate().filter_map(|(at, p)| Some((at, p.as_ref()?)));
        here.filter(|(_, parameter)| parameter.requires_grad())
    }

    /// Normalises by this until the guard is dropped.
    pub(crate) fn lend(&self, met: Met) -> LentMet {
        self.place.set(Some(met));
        LentMet(self.place.clone())
    }
}

impl NormSettled {
    /// What this micro-batch is normalised by.
    pub(crate) fn met(&self, input: &Tensor) -> Met {
        // Nobody asks for the sums where neither the layer nor what is before it is trained.
        let asked = self.trains || input.requires_grad();
        let probes = if asked { &self.probes } else { &self.affine };
        Met {
            mean: self.mean.shallow_clone(),
            variance: self.variance.shallow_clone(),
            probes: probes.each_ref().map(Tensor::shallow_clone),
            input: input.shallow_clone(),
        }
    }

    /// Weight and bias of what is missing in the gradients, from their probes' sums over all micro-batches,
    /// 2 × channels.
    pub(crate) fn missing(&self, sums: &Tensor) -> Result<[Tensor; 2]> {
        let both = sums.f_mul(&self.factor)?;
        Ok([both.f_select(0, 0)?, both.f_select(0, 1)?])
    }

    /// The gradient of a micro-batch with what was missing in it.
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
        told(batch_norm(&norm, gradient.map_or(Addend::Nothing, Addend::Tensor), false))
    }
}

impl Met {
    /// Whether this is what was counted.
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

/// Where a layer finds what normalises its next input.
#[derive(Debug, Clone, Default)]
pub(super) struct MetPlace(Arc<Mutex<Option<Met>>>);

impl MetPlace {
    fn set(&self, met: Option<Met>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = met;
    }

    /// What is here, to be found again by a second use of the layer.
    pub(super) fn shared(&self) -> Option<Met> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Met::share)
    }
}

/// What a layer normalises by while this lives; even a panic ends it.
pub(crate) struct LentMet(MetPlace);

impl Drop for LentMet {
    fn drop(&mut self) {
        self.0.set(None);
    }
}
