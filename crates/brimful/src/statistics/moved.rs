//! New values of running statistics, before they replace the old ones.

use brimful_torch::foreach;
use tch::{Device, Kind, Tensor};

use super::running::Running;
use crate::Result;
use crate::ranks::RankSum;

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
