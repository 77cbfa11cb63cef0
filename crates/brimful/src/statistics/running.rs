//! Running statistics of one layer, and the momentum by which a batch moves them.

use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use crate::Result;

/// A layer's running mean and variance, with their momentum.
#[derive(Debug)]
pub(crate) struct Running {
    pub(super) id: u64,
    pub(crate) mean: Tensor,
    pub(crate) variance: Tensor,
    pub(super) momentum: Momentum,
}

/// Factor by which one batch moves running statistics.
#[derive(Debug)]
pub(crate) enum Momentum {
    /// Moves by this fraction of the difference.
    Given(f64),
    /// Moves to the average of all batches; the tensor counts the batches.
    Average(Tensor),
}

/// Destination of a layer's statistics: tensors and the momentum by which they move; `None` for no destination.
pub(crate) type Target = Option<(Tensor, Tensor, f64)>;

impl Running {
    pub(crate) fn new(mean: Tensor, variance: Tensor, momentum: Momentum) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), mean, variance, momentum }
    }

    pub(crate) fn share(&self) -> Self {
        Self {
            id: self.id,
            mean: self.mean.shallow_clone(),
            variance: self.variance.shallow_clone(),
            momentum: match &self.momentum {
                Momentum::Given(momentum) => Momentum::Given(*momentum),
                Momentum::Average(batches) => Momentum::Average(batches.shallow_clone()),
            },
        }
    }

    /// Returns all tensors that a batch moves.
    pub(super) fn all(&self) -> impl Iterator<Item = &Tensor> {
        [&self.mean, &self.variance].into_iter().chain(self.momentum.batches())
    }

    /// Returns the running statistics themselves, to be moved by the current batch.
    pub(super) fn whole(&self) -> Result<Target> {
        let momentum = match &self.momentum {
            Momentum::Given(momentum) => *momentum,
            Momentum::Average(batches) => {
                let counted = batches.shallow_clone().f_add_scalar_(1.0)?;
                1.0 / counted.f_double_value(&[])?
            }
        };
        let Self { mean, variance, .. } = self.share();
        Ok(Some((mean, variance, momentum)))
    }
}

impl Momentum {
    /// Returns the momentum; `None` if it depends on the number of batches.
    pub(super) fn given(&self) -> Option<f64> {
        match self {
            Self::Given(momentum) => Some(*momentum),
            Self::Average(_) => None,
        }
    }

    /// Returns the number of batches so far; `None` if batches are not counted.
    pub(super) fn batches(&self) -> Option<&Tensor> {
        match self {
            Self::Given(_) => None,
            Self::Average(batches) => Some(batches),
        }
    }
}
