//! Running statistics of one layer, the momentum by which a batch moves them, and their new values.

use std::sync::atomic::{AtomicU64, Ordering};

use brimful_torch::foreach;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::ranks::RankSum;

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
    /// This fraction of the way.
    Given(f64),
    /// To the average of all batches; the tensor counts them.
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
    /// Returns the momentum, where it does not depend on the number of batches.
    pub(super) fn given(&self) -> Option<f64> {
        match self {
            Self::Given(momentum) => Some(*momentum),
            Self::Average(_) => None,
        }
    }

    /// Returns the number of batches so far, where it is counted.
    pub(super) fn batches(&self) -> Option<&Tensor> {
        match self {
            Self::Given(_) => None,
            Self::Average(batches) => Some(batches),
        }
    }
}

/// Running statistics and their new values.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    running: Vec<Tensor>,
    values: Vec<Tensor>,
}

impl Moved {
    pub(super) fn push(&mut self, running: &Running, values: Vec<Tensor>) {
        self.running.extend(running.all().map(Tensor::shallow_clone));
        self.values.extend(values);
    }

    /// Copies the new values. Allocates nothing, so it cannot fail half-way.
    pub(crate) fn apply(self) -> Result<()> {
        Ok(foreach::copy(&self.running, &self.values)?)
    }

    /// Returns the values that these statistics have on the rank at index `place`. All other ranks add zeros, so the
    /// values are exact to the last bit. `number` identifies the sum in the collective.
    pub(crate) fn as_at(
        place: usize,
        running: Vec<Tensor>,
        collective: &RankSum,
        number: usize,
    ) -> Result<Self> {
        if running.is_empty() {
            return Ok(Self::default());
        }
        let flat = |t: &Tensor| {
            t.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_reshape([-1_i64])
        };
        let rows = running.iter().map(flat).collect::<Result<Vec<_>, _>>()?;
        let mut all = Tensor::f_cat(&rows, 0)?;
        if !collective.is_at(place) {
            let _itself = all.f_zero_()?;
        }
        collective.sum_now(number, &all)?;
        let lengths: Vec<_> = rows.iter().map(|row| row.numel() as i64).collect();
        let parts = all.f_split_with_sizes(lengths, 0)?.into_iter().zip(&running);
        let value = |(part, like): (Tensor, &Tensor)| {
            part.f_view(&like.size()[..])?.f_to_kind(like.kind())?.f_to_device(like.device())
        };
        let values = parts.map(value).collect::<Result<_, _>>()?;
        Ok(Self { running, values })
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.running.extend(other.running);
        self.values.extend(other.values);
    }
}
